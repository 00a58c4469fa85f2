"""Older weights of a stage, kept for forwards and backwards in flight (PipeDream's weight stashing)."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from lp_pipe.private_torch import hooks_of, parameter_like, parameters_of, put_parameter


class WeightVersions:
    """The versions of a stage's weights, numbered by the updates that made them.

    The optimizer changes the parameters in place. In the modules, a forward uses stand-ins of its version in place of
    the parameters. Stand-ins share the newest weights' memory until an update must not change it: then the parameters
    move to a copy. So there are as many copies as versions in use. The last stage never needs
    older weights and has none.
    """

    def __init__(self, modules: Iterable[nn.Module], parameters: Mapping[str, nn.Parameter]) -> None:
        self._names = [name for name, parameter in parameters.items() if parameter.requires_grad]
        self._parameters = [parameters[name] for name in self._names]
        index = {id(parameter): position for position, parameter in enumerate(self._parameters)}
        self._places = [
            (module, name, index[id(parameter)])
            for module in modules
            for name, parameter in parameters_of(module).items()
            if id(parameter) in index
        ]
        self._kept: dict[int, list[nn.Parameter]] = {}
        self.newest = 0
        self.oldest = 0

    def use(self, version: int) -> int:
        """Give the modules the weights of a version, or the oldest ones if that is gone; return the version used."""
        version = max(version, self.oldest)
        if version not in self._kept:
            assert version == self.newest, f"version {version} is gone; there are {sorted(self._kept)}"
            self._kept[version] = [_stand_in(parameter, parameter.data) for parameter in self._parameters]
        self._put(self._kept[version])
        return version

    def use_own(self) -> None:
        """Give the modules the parameters that the optimizer knows."""
        self._put(self._parameters)

    def take_gradients(self, version: int) -> None:
        """Move the gradients of backwards with this version to the parameters."""
        stand_ins = self._kept.get(max(version, self.oldest), [])
        for parameter, stand_in in zip(self._parameters, stand_ins, strict=bool(stand_ins)):
            parameter.grad, stand_in.grad = stand_in.grad, None

    def begin_next(self, needed_from: int) -> None:
        """Prepare for an update of the parameters: keep the versions from `needed_from` on, and drop older ones."""
        self._drop_before(needed_from)  # first, so that their memory is free before the copy is made
        if needed_from <= self.newest:
            self.use(self.newest)
            with torch.no_grad():
                for parameter in self._parameters:
                    parameter.data = parameter.data.clone()
        self.newest += 1
        self._drop_before(needed_from)

    def forget(self) -> None:
        """Start again with the present weights, as at the start of the training; the numbers continue."""
        self.use_own()
        self._kept.clear()
        self.oldest = self.newest

    @property
    def older_bytes(self) -> int:
        """The bytes of kept weights before the newest, which are copies."""
        return sum(tensor.nbytes for weights in self.older().values() for tensor in weights.values())

    def older(self) -> dict[int, dict[str, Tensor]]:
        """Return the kept weights before the newest, by version and name."""
        return {
            version: {name: kept.data for name, kept in zip(self._names, stand_ins, strict=True)}
            for version, stand_ins in self._kept.items()
            if version < self.newest
        }

    def restore(self, newest: int, older: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Continue from version `newest`, which the parameters have.

        Those of `older` that lead to it without a gap are kept.
        """
        self.forget()
        self.newest = self.oldest = newest
        while self._names and set(self._names) <= older.get(self.oldest - 1, {}).keys():
            self.oldest -= 1
            values = [older[self.oldest][name] for name in self._names]
            self._kept[self.oldest] = [
                _stand_in(parameter, _like(parameter, value))
                for parameter, value in zip(self._parameters, values, strict=True)
            ]

    def _drop_before(self, needed_from: int) -> None:
        self.oldest = max(self.oldest, min(needed_from, self.newest))
        for version in [version for version in self._kept if version < self.oldest]:
            del self._kept[version]

    def _put(self, parameters: Sequence[nn.Parameter]) -> None:
        for module, name, index in self._places:
            if type(module).__setattr__ is nn.Module.__setattr__:
                put_parameter(module, name, parameters[index])
            else:  # nn.LSTM keeps its own list of parameters
                setattr(module, name, parameters[index])


def _stand_in(parameter: nn.Parameter, weights: Tensor) -> nn.Parameter:
    """Return a parameter with other weights, but with the class, attributes and hooks of `parameter`."""
    result = nn.Parameter(weights)
    if type(result) is not type(parameter):
        result = parameter_like(parameter, weights)
    vars(result).update(vars(parameter))
    for hook in hooks_of(parameter, "backward"):
        result.register_hook(hook)
    for hook in hooks_of(parameter, "post_accumulate_grad"):
        result.register_post_accumulate_grad_hook(hook)
    return result


def _like(parameter: nn.Parameter, value: Tensor) -> Tensor:
    return torch.empty_like(parameter.data).copy_(value)
