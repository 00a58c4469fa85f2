"""Settings of a stage's modules that `apply` changes beside tensors: modes, drop rates, frozen parameters."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from lp_pipe.errors import PipelineError
from lp_pipe.pipeline.protocol import Change, Modules, Settings
from lp_pipe.private_torch import parameters_of

_PLAIN = (type(None), bool, int, float, str)
_CALLBACKS = "(callbacks)"  # no name of a module
_REQUIRES_GRAD = ".requires_grad"  # behind a parameter's name; no attribute has a dot in its name


def with_loss(modules: Iterable[tuple[str, nn.Module]], loss: Any) -> Modules:
    """Return modules by name, with those of the loss, if it is a module, as "loss" and "loss.…"."""
    inner = loss.named_modules() if isinstance(loss, nn.Module) else ()
    return {**dict(modules), **{f"loss.{name}".removesuffix("."): module for name, module in inner}}


class ModuleSettings:
    """The plain attributes of modules that `apply` has changed, so that a checkpoint has them and a load undoes them.

    A checkpoint holds data and no code, so it keeps the effects of a change: for each module the attributes that are
    numbers, strings, booleans or None (`p` of a Dropout, `training`, …) and which parameters require a gradient.
    """

    def __init__(self, modules: Modules) -> None:
        self._modules = modules
        self._first: Settings = {}  # the values as built of what has been changed since
        self._applied_until = -1  # the step of the last callback of the model that was called

    def apply_due(self, callbacks: Mapping[int, Change], step: int) -> list[int]:
        """Call the model's callbacks that belong before this step, each once; return their steps."""
        due = sorted(when for when in callbacks if self._applied_until < when <= step)
        for when in due:
            self.apply(callbacks[when])
            self._applied_until = when
        return due

    def apply(self, change: Change) -> Any:
        """Return what `change` returns for these modules; after an exception the settings are as before.

        Raises:
            PipelineError: `change` has changed what a checkpoint could not keep, such as a submodule or a hook.
        """
        settings, structure = self._settings(), self._structure()
        try:
            with torch.no_grad():
                result = change(dict(self._modules))
            self._refuse_restructured(structure)
        except BaseException:
            self._set(settings)
            raise
        for name, attribute, value in _differences(settings, self._settings()):
            self._first.setdefault(name, {}).setdefault(attribute, value)
        return result

    def changed(self) -> Settings:
        """Return the current values of all settings that have been changed since the modules were built."""
        settings = self._settings()
        found = {name: {key: settings[name].get(key) for key in first} for name, first in self._first.items()}
        if self._applied_until >= 0:
            found[_CALLBACKS] = {"applied_until": self._applied_until}
        return found

    def restore(self, saved: Settings) -> None:
        """Undo all changes, then set the saved values of modules that are here."""
        self._set(self._first)
        self._applied_until = saved.get(_CALLBACKS, {}).get("applied_until", -1)
        known = {name: values for name, values in saved.items() if name in self._modules}
        settings = self._settings()
        self._first = {name: {key: settings[name].get(key) for key in values} for name, values in known.items()}
        self._set(known)

    def _settings(self) -> Settings:
        return {name: dict(_settings_of(module)) for name, module in self._modules.items()}

    def _set(self, settings: Mapping[str, Mapping[str, Any]]) -> None:
        for name, values in settings.items():
            module = self._modules[name]
            for key, value in values.items():
                if key.endswith(_REQUIRES_GRAD):
                    parameter = parameters_of(module).get(key.removesuffix(_REQUIRES_GRAD))
                    if parameter is not None:
                        parameter.requires_grad_(value)
                else:
                    vars(module)[key] = value

    def _structure(self) -> dict[str, dict[str, Any]]:
        return {name: dict(_structure_of(module)) for name, module in self._modules.items()}

    def _refuse_restructured(self, before: Mapping[str, Mapping[str, Any]]) -> None:
        for name, module in self._modules.items():
            now = dict(_structure_of(module))
            changed = sorted(key for key in before[name].keys() | now.keys() if before[name].get(key) != now.get(key))
            if changed:
                raise PipelineError(
                    f"apply() has changed {changed[0]} of the module {name!r} ({type(module).__name__}), which a "
                    "checkpoint could not keep. Change only numbers, strings, modes, requires_grad and the values of "
                    "tensors; build the model with its submodules, hooks and parametrizations"
                )


def _settings_of(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for key, value in vars(module).items():
        if isinstance(value, _PLAIN):
            yield key, value
    for name, parameter in parameters_of(module).items():
        if parameter is not None:
            yield name + _REQUIRES_GRAD, parameter.requires_grad


def _structure_of(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield what must not change: submodules, parameters, names of buffers, hooks, other attributes."""
    for key, value in vars(module).items():
        if key == "_buffers":
            yield key, tuple(value)
        elif isinstance(value, dict):
            yield key, tuple((name, id(part)) for name, part in value.items())
        elif not isinstance(value, _PLAIN):
            yield key, id(value)


def _differences(before: Settings, now: Settings) -> Iterator[tuple[str, str, Any]]:
    """Yield module, attribute and value before of every setting that has another value now."""
    for name, values in now.items():
        for key in before[name].keys() | values.keys():
            was, value = before[name].get(key), values.get(key)
            if type(was) is not type(value) or was != value:
                yield name, key, was
