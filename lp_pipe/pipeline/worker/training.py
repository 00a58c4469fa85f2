"""The optimizer's side of a worker: gradients, norms, steps, and what a checkpoint keeps of them."""

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from lp_pipe.errors import PipelineError
from lp_pipe.pipeline.compute.activation_meter import bytes_of
from lp_pipe.pipeline.compute.stage import Stage
from lp_pipe.pipeline.config import PipelineConfig
from lp_pipe.pipeline.layers.model import OptimizerFactory, SchedulerFactory
from lp_pipe.pipeline.layers.optimizer_factories import make_optimizer, make_scheduler, wants_metric
from lp_pipe.pipeline.protocol import Report, UpdateProgress
from lp_pipe.pipeline.saving.contents import Saved
from lp_pipe.private_torch import versions_of
from lp_pipe.training.gradients import GradientNorm, dense, is_finite, norms_of, unscale
from lp_pipe.training.optimizer_state import (
    OfParameter,
    refuse_hidden_state,
    restore,
    state_of,
    values_of_group,
    with_group_values,
)
from lp_pipe.training.resume_checks import (
    GroupMember,
    is_same,
    kind_of,
    refuse_other_dtypes,
    refuse_other_groups,
    refuse_other_optimizer,
    refuse_other_scheduler,
)
from lp_pipe.training.rng import generators_locked, optimizer_place, step_rng


class Training:
    """One optimizer over all parameters of a worker's stages; none when there is nothing to train."""

    def __init__(
        self, stages: list[Stage], optimizer: OptimizerFactory, lr_scheduler: SchedulerFactory | None, seed: int = 0
    ) -> None:
        self._place = optimizer_place(stages[0].index if stages else 0)
        self._seed = seed
        self._parameters = [item for stage in stages for item in stage.named_parameters()]
        self._optimizer: torch.optim.Optimizer | None = None
        self._scheduler_factory = lr_scheduler
        self._lr_scheduler: Any = None
        self.waits_for_metric = False  # whether training steps leave the scheduler alone
        self.update_progress = UpdateProgress.NOTHING_TO_DO
        # Not for frozen ones alone: factories often leave these out, and torch refuses an empty list.
        if any(parameter.requires_grad for _, parameter in self._parameters):
            # Not while a layer is made: torch imports its compiler for both, and is not ready for two threads.
            with generators_locked():
                self._optimizer = make_optimizer(optimizer, self._parameters)
            if lr_scheduler is not None:
                self._lr_scheduler = make_scheduler(lr_scheduler, self._optimizer)
                self.waits_for_metric = wants_metric(self._lr_scheduler)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All that this worker's stages own, in order."""
        return [parameter for _, parameter in self._parameters]

    @property
    def named_parameters(self) -> dict[str, nn.Parameter]:
        """The same, by the names that users see."""
        return dict(self._parameters)

    def gradient_norms(self) -> dict[str, GradientNorm]:
        """By the names of the parameters that have a gradient."""
        gradients = {name: parameter.grad for name, parameter in self._parameters if parameter.grad is not None}
        return dict(zip(gradients, norms_of(gradients.values()), strict=True))

    def examine(self, report: Report, config: PipelineConfig, scale: float | None) -> None:
        """What all stages must know of each other's gradients before they update. Takes the losses' factor out.

        Raises:
            PipelineError: a layer has begun to train what was frozen at the start, and has no optimizer.
        """
        self._refuse_unfrozen()
        if scale is not None:
            report.overflowed = self._unscale_gradients(scale)
        if config.clip_grad_norm is not None:
            report.gradient_norms = self.gradient_norms()
        if config.on_nan != "ignore" and scale is None:
            report.overflowed = not self.has_finite_gradients(report.gradient_norms)

    def has_finite_gradients(self, norms: Mapping[str, GradientNorm] = MappingProxyType({})) -> bool:
        """Whether no gradient holds NaN or infinity. norms: theirs, where they are known."""
        gradients = [dense(parameter.grad) for _, parameter in self._parameters if parameter.grad is not None]
        found = list(norms.values()) or norms_of(gradients)
        if not found or bool(torch.stack([norm for norm, _ in found]).isfinite().all()):
            return True
        return all(is_finite(gradient) for gradient in gradients)  # the norm of finite ones may be too large

    def _unscale_gradients(self, factor: float) -> bool:
        """Divide them by the factor of the losses; whether one is infinite or NaN, so that the step must be skipped.

        As GradScaler only those of parameters that the optimizer has.
        """
        groups = self._optimizer.param_groups if self._optimizer is not None else []
        gradients = [parameter.grad for group in groups for parameter in group["params"]]
        return unscale([gradient for gradient in gradients if gradient is not None], factor)

    def step(self, step: int, total_norm: Tensor | None, max_norm: float | None, *, skip: bool = False) -> None:
        """Clip as torch.nn.utils.clip_grad_norm_ does, with the norm over all stages; then one optimizer step."""
        if self._optimizer is None:
            self.clear_gradients()
            return
        self.update_progress, versions = UpdateProgress.NOT_BEGUN, self._versions()
        try:
            if max_norm is not None and total_norm is not None:
                nn.utils.clip_grads_with_norm_(self.parameters, max_norm, total_norm)
            if not skip:
                self._step_optimizer(step, 0)
            self.update_progress = UpdateProgress.WITHOUT_SCHEDULER
            self.step_scheduler()
            self.update_progress = UpdateProgress.DONE
        finally:
            if self.update_progress is UpdateProgress.NOT_BEGUN and self._versions() != versions:
                self.update_progress = UpdateProgress.PARTIAL
            self.clear_gradients()  # else the next step would add to them

    def update(self, step: int, index: int) -> None:
        """One of an asynchronous step's updates."""
        self._step_optimizer(step, index)
        self.clear_gradients()

    def step_scheduler(self) -> None:
        """Once a step, whatever the number of its updates; but not one that waits for a metric."""
        if self._lr_scheduler is not None and not self.waits_for_metric:
            self._lr_scheduler.step()

    def scheduler_kind(self) -> str | None:
        """What it is; None: there is none here."""
        return kind_of(self._lr_scheduler) if self._lr_scheduler is not None else None

    def step_scheduler_by(self, metric: float) -> None:
        """One that waits for a metric."""
        if self.waits_for_metric:
            self._lr_scheduler.step(metric)

    def learning_rates(self) -> dict[str, float]:
        """By the names of the parameters that the next step would change, if their optimizer knows such a thing."""
        trained = {name: group for group, name, parameter in self._grouped() if parameter.requires_grad}
        return {name: float(trained[name]["lr"]) for name, _ in self._parameters if "lr" in trained.get(name, ())}

    def scale_gradients(self, factor: float) -> None:
        """Multiply all that are there."""
        for _, parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def bytes(self) -> tuple[int, int, int]:
        """Those of the parameters, of the gradients that are there, and of the optimizer's state."""
        parameters = [parameter for _, parameter in self._parameters]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        states = state_of(self._optimizer).values() if self._optimizer is not None else ()
        state = [value for values in states for value in values.values() if isinstance(value, Tensor)]
        return _bytes(parameters), _bytes(gradients), _bytes(state)

    def clear_gradients(self) -> None:
        """Of all parameters, also of those that the optimizer does not have."""
        for _, parameter in self._parameters:
            parameter.grad = None

    def share(
        self,
        weights: dict[str, Tensor],
        formats: dict[str, int],
        loss: dict[str, Tensor],
        versions: list[dict[str, Any]],
    ) -> Saved:
        """What a checkpoint keeps, under the parameters' names, so that any cut can take it. Not copied.

        formats: of the weights. loss: its buffers. versions: an asynchronous worker's.
        """
        optimizer, lr_scheduler = self._optimizer_state(), self._scheduler_state()
        return Saved(weights, optimizer, lr_scheduler, versions, loss, formats, self.scheduler_kind())

    def check(self, saved: Saved) -> list[str]:
        """Return the trained parameters of which the checkpoint has no optimizer state: they were frozen, or are new.

        Raises:
            PipelineError: it is of other dtypes, another optimizer, other parameter groups, or another scheduler.
        """
        refuse_other_dtypes(self.named_parameters, saved.weights)
        for group, name, _ in self._grouped():
            if name in saved.optimizer and self._optimizer is not None:
                kind, _ = saved.optimizer[name].get("group", (None, ""))  # older versions kept none
                refuse_other_optimizer(self._optimizer, group, saved.optimizer[name]["options"], kind)
        own = [GroupMember(name, _options(group), id(group)) for group, name, _ in self._grouped()]
        refuse_other_groups(own, saved.optimizer)
        if self._lr_scheduler is not None:
            refuse_other_scheduler(self._lr_scheduler, saved.scheduler_kind)
        return [name for name in self._trained_names() if name not in saved.optimizer]

    def restore(self, saved: Saved) -> None:
        """Set optimizer and scheduler to what was saved; the weights are the stages' own business."""
        saved = saved._replace(optimizer=self._with_fresh(saved.optimizer))
        self._restore_optimizer(saved.optimizer)
        if self._lr_scheduler is not None and saved.lr_scheduler is not None:
            self._lr_scheduler.load_state_dict(self._for_own_groups(saved.lr_scheduler, saved.optimizer))
        elif self._optimizer is not None and self._scheduler_factory is not None:
            # It was trained without. The scheduler that there is has set its first rates, such as a warmup's, which
            # what was saved has replaced: one that multiplies the last rate would go up from there.
            for group, name, _ in self._grouped():
                if name in saved.optimizer and "initial_lr" not in saved.optimizer[name]["options"]:
                    group.pop("initial_lr", None)
            self._lr_scheduler = make_scheduler(self._scheduler_factory, self._optimizer)

    def _step_optimizer(self, step: int, update: int) -> None:
        """Replicas draw the same (SGLD's noise), or they would not stay copies; and so do runs, and who resumes one."""
        if self._optimizer is not None:
            with step_rng(self._seed, self._place, step, update):
                self._optimizer.step()

    def _versions(self) -> list[int]:
        return versions_of(parameter for _, parameter in self._parameters)

    def _optimizer_state(self) -> dict[str, dict[str, Any]]:
        """For each parameter its optimizer state, and the options of its group (the scheduler changes them)."""
        if self._optimizer is None:
            return {}
        refuse_hidden_state(self._optimizer)
        names = {id(parameter): name for name, parameter in self._parameters}
        groups, scheduler = self._optimizer.param_groups, self._scheduler_state() or {}
        states = state_of(self._optimizer)
        found: dict[str, dict[str, Any]] = {}
        for index, group in enumerate(groups):
            of_group = {"options": _options(group), "schedule": values_of_group(scheduler, len(groups), index)}
            if group["params"]:
                of_group["group"] = type(self._optimizer).__name__, names[id(group["params"][0])]
            for parameter in group["params"]:
                found[names[id(parameter)]] = {"state": dict(states.get(parameter, {})), **of_group}
        return found

    def _scheduler_state(self) -> dict[str, Any] | None:
        return self._lr_scheduler.state_dict() if self._lr_scheduler is not None else None

    def _refuse_unfrozen(self) -> None:
        unfrozen = [name for name, parameter in self._parameters if parameter.grad is not None]
        if self._optimizer is None and unfrozen:
            raise PipelineError(
                f"{', '.join(unfrozen)}: all parameters of this stage were frozen at the start, so that it has no "
                "optimizer, but these have gradients now: cut so that something in the stage is trained from the "
                "start, or begin with trainable parameters and a learning rate of 0"
            )

    def _for_own_groups(self, scheduler: dict[str, Any], saved: dict[str, dict[str, Any]]) -> dict[str, Any]:
        names = {id(parameter): name for name, parameter in self._parameters}
        groups = self._optimizer.param_groups if self._optimizer is not None else []
        firsts = [names[id(group["params"][0])] if group["params"] else None for group in groups]
        values = [saved.get(name, {}).get("schedule") if name is not None else None for name in firsts]
        if not any(values):  # written before these were kept: as one process has it
            return scheduler
        return with_group_values(scheduler, self._lr_scheduler.state_dict(), values)

    def _trained_names(self) -> list[str]:
        """Without frozen parameters: a stage that has no others has saved nothing of them."""
        return [name for _, name, parameter in self._grouped() if parameter.requires_grad]

    def _with_fresh(self, saved: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """Add what trained parameters begin with of which nothing was saved: no state, and the saved options.

        The options (the scheduler changes them) are those of the group where a parameter of the same group was saved
        on this worker, else those that all saved parameters have, if there is one kind: a single group, as one process
        would have. Otherwise the group keeps its own.
        """
        of_groups = {id(group): saved[name] for group, name, _ in self._grouped() if name in saved}
        common = next(iter(saved.values()), {})
        if any(_differs(one, common) for one in saved.values()):
            common = {}
        found = dict(saved)
        for group, name, parameter in self._grouped():
            if name not in saved and parameter.requires_grad:
                like = of_groups.get(id(group), common)
                found[name] = {"state": {}, "options": like.get("options", _options(group))}
                found[name].update({"schedule": like["schedule"]} if "schedule" in like else {})
        return found

    def _restore_optimizer(self, saved: dict[str, dict[str, Any]]) -> None:
        if self._optimizer is None:
            return
        of_parameters: dict[Tensor, OfParameter] = {}
        for group, name, parameter in self._grouped():
            if name in saved:
                options = saved[name]["options"]
                state = _beside(parameter, saved[name]["state"], {**group, **options})
                of_parameters[parameter] = OfParameter(state, options)
        restore(self._optimizer, of_parameters)

    def _grouped(self) -> Iterator[tuple[dict[str, Any], str, nn.Parameter]]:
        """The optimizer's parameters, each with its group and its name."""
        names = {id(parameter): name for name, parameter in self._parameters}
        for group in self._optimizer.param_groups if self._optimizer is not None else ():
            for parameter in group["params"]:
                yield group, names[id(parameter)], parameter


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(map(bytes_of, tensors))


def _differs(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return any(not is_same(one.get(key), other.get(key)) for key in ("options", "schedule"))


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _beside(parameter: nn.Parameter, state: dict[str, Any], group: dict[str, Any]) -> dict[str, Any]:
    """State that was read on the host, where the parameter is.

    Source: torch.optim.Optimizer.load_state_dict, which leaves `step` on the host unless a kernel is to read it.
    """
    stays = set() if group.get("fused") or group.get("capturable") else {"step"}
    return {
        key: _as(parameter, value) if isinstance(value, Tensor) and key not in stays else value
        for key, value in state.items()
    }


def _as(parameter: nn.Parameter, value: Tensor) -> Tensor:
    if value.shape != parameter.shape or value.stride() == parameter.stride():
        return value.to(parameter.device)
    return torch.empty_like(parameter, dtype=value.dtype).copy_(value)  # a checkpoint keeps no strides
