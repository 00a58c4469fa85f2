"""Parameters that several layers share, and one object for each of them in a stage.

The first stage that has such a parameter owns it: there it is in the optimizer, counts in the norm, and is saved. The
other stages borrow it. In every micro-batch a borrower's gradient goes to the next earlier stage that has the
parameter, where autograd adds to it as it would in one process, last use first. After the step the owner sends the
weight.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from lp_pipe.errors import PipelineError
from lp_pipe.pipeline.layers.build import build_layers, outlined
from lp_pipe.pipeline.layers.cuts import stage_of
from lp_pipe.pipeline.layers.model import FromFunction
from lp_pipe.pipeline.layers.piece import Piece
from lp_pipe.pipeline.layers.wrapper import unwrapped
from lp_pipe.pipeline.schedule.channels import EdgeKind, ScheduleEdge
from lp_pipe.private_torch import buffers_of, is_batch_norm

Names = tuple[str, ...]  # names of one parameter, in the order of the layers; the optimizer sees the first


def tied_names(sources: Sequence[Any], pairs: Sequence[tuple[str, str]]) -> list[Names]:
    """Return all names of every parameter that has more than one.

    Such parameters are listed in the model's `tied`, or are one object in ready-made layers.

    Raises:
        PipelineError: a pair names no parameter, or parameters of different shapes.
    """
    wanted = {layer_of(name) for pair in pairs for name in pair}
    parameters = dict(_named_parameters(sources, wanted))
    same = {name: {name} for name in parameters}
    first_name: dict[int, str] = {}
    for name, parameter in parameters.items():
        _join(same, first_name.setdefault(id(parameter), name), name)
    for pair in pairs:
        _check_pair(pair, parameters)
        _join(same, *pair)
    groups = {id(group): group for group in same.values() if len(group) > 1}
    return [tuple(name for name in parameters if name in group) for group in groups.values()]


def tied_edges(groups: Sequence[Names], cuts: Sequence[int]) -> list[ScheduleEdge]:
    """Return the channels that carry gradients of tied parameters to their owners, and new weights back."""
    found: dict[tuple[EdgeKind, int, int], list[str]] = {}
    for names in groups:
        holders = sorted({stage_of(layer_of(name), cuts) for name in names})
        for position, holder in enumerate(holders[1:]):
            found.setdefault(("tied gradient", holder, holders[position]), []).append(names[0])
            found.setdefault(("tied weights", holders[0], holder), []).append(names[0])
    return [ScheduleEdge(*ends, tuple(names)) for ends, names in found.items()]


def tie(
    layers: Sequence[nn.Module], first_layer: int, groups: Sequence[Names], owners: Mapping[int, Any], seed: int
) -> dict[str, nn.Parameter]:
    """Give a stage's layers one object for each tied parameter; return these by the first of their names.

    owners: sources of layers on earlier stages with parameters that have other initial values than this stage's.
    """
    tied: dict[str, nn.Parameter] = {}
    built = {index: build_layers([source], index, seed)[0] for index, source in owners.items()}
    own = dict(enumerate(layers, start=first_layer))
    for names in groups:
        here = [name for name in names if layer_of(name) in own]
        if here:
            origin, name = (built, names[0]) if layer_of(names[0]) in built else (own, here[0])
            module, attribute = _place(origin, name)
            parameter = getattr(module, attribute)
            tied[names[0]] = parameter if layer_of(names[0]) in own else _borrowed(parameter)
            for name in here:
                module, attribute = _place(own, name)
                setattr(module, attribute, tied[names[0]])
    return tied


def _borrowed(parameter: nn.Parameter) -> nn.Parameter:
    """Return a copy without hooks: the owner's run on the sum of all gradients, once."""
    result = copy.deepcopy(parameter)
    vars(result).update(vars(parameter))
    return result


def layer_of(name: str) -> int:
    """Return the index of a parameter's layer; -1 if the name is not one of nn.Sequential's."""
    index = name.split(".", 1)[0]
    return int(index) if index.isdecimal() else -1


def shared_buffers(sources: Sequence[Any], cuts: Sequence[int]) -> dict[str, str]:
    """Return the names of buffers that layers of different stages share, each with the error for a write to it.

    Each stage has a copy, which is right for constants, such as rotary angles and masks.

    Raises:
        PipelineError: two stages would update a BatchNorm's buffer; the error names both layers and says how to cut
            instead.
    """
    firsts: dict[int, tuple[int, str]] = {}
    found: dict[str, str] = {}
    for index, source in enumerate(sources):
        # a piece has copies of constants
        is_piece = any(isinstance(module, Piece) for module in _ready(source).modules())
        for place, module in _ready(source).named_modules(prefix=str(index)):
            for attribute, buffer in buffers_of(module).items():
                name = f"{place}.{attribute}"
                first, other = firsts.setdefault(id(buffer), (index, name)) if buffer is not None else (index, name)
                if any(first < cut <= index for cut in cuts):
                    why = (
                        f"layers {first} and {index} share a buffer ({name}) that training writes to, but are in "
                        f"different stages (cuts {list(cuts)}): choose cut points that leave layers {first} to "
                        f"{index} in one stage, or give each a buffer of its own"
                    )
                    if is_piece or is_batch_norm(module):
                        raise PipelineError(why)
                    found[name] = why
                    found.setdefault(other, why)
    return found


def _named_parameters(sources: Sequence[Any], wanted: set[int]) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield every name of every parameter, for ready-made layers and the `wanted` ones."""
    for index, source in enumerate(sources):
        module = outlined(source) if index in wanted else _ready(source)
        yield from module.named_parameters(prefix=str(index), remove_duplicate=False)


def _ready(source: Any) -> nn.Module:
    module = source.module if isinstance(source, FromFunction) else source
    return module if isinstance(module, nn.Module) else nn.Identity()


def _check_pair(pair: tuple[str, str], parameters: Mapping[str, nn.Parameter]) -> None:
    for name in pair:
        if name not in parameters:
            raise PipelineError(
                f"tied={pair}: the model has no parameter {name!r}: use the names that nn.Sequential(*layers) gives, "
                "such as '0.weight'"
            )
    first, second = (parameters[name] for name in pair)
    if first.shape != second.shape or first.dtype != second.dtype:
        kinds = " and ".join(f"{list(p.shape)} of {p.dtype}" for p in (first, second))
        raise PipelineError(f"tied={pair}: these are different parameters, {kinds}: only equal shapes can be one")


def _join(same: dict[str, set[str]], one: str, other: str) -> None:
    if same[one] is not same[other]:
        same[one] |= same[other]
        for name in same[other]:
            same[name] = same[one]


def _place(layers: Mapping[int, nn.Module], name: str) -> tuple[nn.Module, str]:
    """Return the module that has a parameter, and the parameter's attribute there."""
    index, path = name.split(".", 1)
    inner, _, attribute = path.rpartition(".")
    return unwrapped(layers[int(index)]).get_submodule(inner), attribute
