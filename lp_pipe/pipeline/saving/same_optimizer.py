"""Whether a checkpoint is of the optimizer that is to go on from it."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from lp_pipe.errors import PipelineError
from lp_pipe.pipeline.saving.state_of_optimizer import keys_beside, says_it_itself, state_of

# torch's schedulers keep these among an optimizer's own.
_OF_SCHEDULERS = frozenset({"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum"})

_ONE_STATE = (
    "let it be a torch.optim.Optimizer that shares its groups and its state with those that it is made of "
    "(docs/pipeline.md, Optimizers)"
)

WEIGHTS_ALONE = (
    "to begin anew with its weights, write them to a file by `lp_pipe checkpoint export`, and give what "
    "safetensors.torch.load_file reads to load_state_dict()"
)


def refuse_other_optimizer(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], saved: Mapping[str, Any], kind: str | None = None
) -> None:
    """saved: the options that the group's parameters have in the checkpoint. kind: the class of the optimizer there.

    By the name of the class: Adam's options and state are AdamW's, too. None: written before that was kept. Then by the
    options: another version of torch may have more or fewer; only another optimizer has some more and some fewer.

    Raises:
        PipelineError: names what differs, and says how to take the weights alone.
    """
    own = type(optimizer).__name__
    if kind is not None and kind != own:
        raise PipelineError(
            f"the checkpoint is of another optimizer, {kind}, than this model's, {own}: give the model that one; "
            f"{WEIGHTS_ALONE}"
        )
    lacking = sorted({*getattr(optimizer, "defaults", ())} - {*saved})
    unknown = sorted({*saved} - {*group} - _OF_SCHEDULERS)
    if saved and lacking and unknown:
        raise PipelineError(
            f"the checkpoint is of another optimizer than {own}: its options have "
            f"{', '.join(unknown)}, and not {', '.join(lacking)}; {WEIGHTS_ALONE}"
        )


def refuse_hidden_state(optimizer: torch.optim.Optimizer) -> None:
    """What its class adds to its state_dict(), or keeps in optimizers of its own, would not go to other stages.

    Raises:
        PipelineError: there is such a thing; says where else it could be.
    """
    kind = type(optimizer).__name__
    if says_it_itself(optimizer):
        packed: Any = optimizer.state_dict()
        if not isinstance(packed, Mapping) or not {"state", "param_groups"} <= packed.keys():
            raise PipelineError(
                f"{kind}.state_dict() is not as torch's are, a dict of 'state' and 'param_groups', by which a "
                f"checkpoint could tell what belongs to which parameter: {_ONE_STATE}"
            )
        hidden = sorted({*packed} - {"state", "param_groups"})
        if hidden:
            raise PipelineError(
                f"{kind}.state_dict() has {', '.join(map(repr, hidden))}, which a checkpoint of a pipeline would lose: "
                "for any number of stages it keeps what belongs to a parameter, so put it into "
                "self.state[parameter], or into the options of the groups"
            )
    elif not hasattr(optimizer, "state"):
        raise PipelineError(
            f"{kind} has neither a state_dict() nor a state, so nothing could be saved of it: {_ONE_STATE}"
        )
    if beside := sorted(map(str, keys_beside(optimizer))):
        raise PipelineError(
            f"{kind}.state has {', '.join(map(repr, beside))}, which is no parameter of its groups, so that a "
            "checkpoint of a pipeline would lose what is there: for any number of stages it keeps what belongs to a "
            "parameter, so put it into self.state[parameter], or into the options of the groups"
        )
    own = state_of(optimizer)
    _refuse_shared_state(kind, own.values())
    for inner in _inner_optimizers(optimizer):
        if any(values.keys() - own.get(parameter, {}).keys() for parameter, values in inner.state.items()):
            raise PipelineError(
                f"{kind} is made of others, {type(inner).__name__} among them, whose state is not in its own, so that "
                f"a checkpoint would lose it: {_ONE_STATE}"
            )


def _refuse_shared_state(kind: str, states: Iterable[Mapping[Any, Any]]) -> None:
    seen: set[int] = set()
    for values in states:
        tensors = {key: value for key, value in values.items() if isinstance(value, torch.Tensor)}
        shared = [key for key, value in tensors.items() if id(value) in seen]
        if shared:
            raise PipelineError(
                f"{kind} keeps one tensor as {shared[0]!r} of several parameters, of which each would have one of its "
                "own after a checkpoint: give each parameter its own, or put it into the options of the groups"
            )
        seen |= {id(value) for value in tensors.values()}


def _inner_optimizers(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    found: list[Any] = []
    for value in vars(optimizer).values():
        if isinstance(value, (list, tuple)):
            found.extend(value)
        elif isinstance(value, Mapping):
            found.extend(value.values())
        else:
            found.append(value)
    return [inner for inner in found if isinstance(inner, torch.optim.Optimizer)]
