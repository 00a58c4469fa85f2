"""The optimizer of a worker: gradients, norms, updates, and what a checkpoint keeps of them."""

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from lp_pipe.errors import NotSupported, PipelineError
from lp_pipe.pipeline.compute.activation_meter import bytes_of
from lp_pipe.pipeline.compute.stage import Stage
from lp_pipe.pipeline.config import PipelineConfig
from lp_pipe.pipeline.layers.model import OptimizerFactory, SchedulerFactory
from lp_pipe.pipeline.layers.optimizer_factories import make_optimizer, make_scheduler, wants_metric
from lp_pipe.pipeline.protocol import Report, UpdateProgress
from lp_pipe.pipeline.saving.contents import Saved
from lp_pipe.pipeline.worker.parameter_shards import BlockShards, ParameterShards
from lp_pipe.private_torch import versions_of
from lp_pipe.training.gradients import GradientNorm, dense, is_finite, norms_of, unscale
from lp_pipe.training.optimizer_state import (
    OfParameter,
    on_device_of,
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
from lp_pipe.training.state_shards import StateShards, refuse_fused_on_cpu, refuse_not_elementwise
from lp_pipe.training.tensor_parts import Box, TensorPart, boxes_of_range, memory_order


class Training:
    """An optimizer and scheduler over all parameters of a worker's stages; neither if there is nothing to train."""

    def __init__(
        self,
        stages: list[Stage],
        optimizer: OptimizerFactory,
        lr_scheduler: SchedulerFactory | None,
        seed: int = 0,
        shards: ParameterShards | None = None,
        *,
        is_offloaded: bool = False,
    ) -> None:
        """shards: what this replica updates, if the replicas divide the parameters among themselves, or offload them.

        is_offloaded: whether the CPU updates copies of the shards in the host's memory.
        """
        self._place = optimizer_place(stages[0].index if stages else 0)
        self._seed = seed
        self._parameters = [item for stage in stages for item in stage.named_parameters()]
        self._optimizer: torch.optim.Optimizer | None = None
        self._shards = shards
        self._states: StateShards | None = None  # of the shards
        self._scheduler_factory = lr_scheduler
        self._lr_scheduler: Any = None
        self.waits_for_metric = False  # whether training steps leave the scheduler alone
        self.update_progress = UpdateProgress.NOTHING_TO_DO
        # Not if all are frozen: factories often leave out frozen ones, and torch refuses an empty list.
        if any(parameter.requires_grad for _, parameter in self._parameters):
            # Not while a layer is made in another thread: both make torch import its compiler, once at a time.
            with generators_locked():
                self._optimizer = make_optimizer(optimizer, self._parameters)
            if shards is not None:
                refuse_not_elementwise(self._optimizer, f"zero={shards.zero}" if shards.zero else "offload='cpu'")
                if shards.zero:
                    refuse_fused_on_cpu(self._optimizer, f"zero={shards.zero}", is_offloaded=is_offloaded)
                if is_offloaded and any(group.get("capturable") for group in self._optimizer.param_groups):
                    raise NotSupported("offload='cpu' with capturable=True: the update runs on the CPU: leave it out")
                self._states = StateShards(self._optimizer, shards.own(), is_offloaded=is_offloaded)
            if lr_scheduler is not None:
                self._lr_scheduler = make_scheduler(lr_scheduler, self._optimizer)
                self.waits_for_metric = wants_metric(self._lr_scheduler)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Return all parameters of this worker's stages, in order."""
        return [parameter for _, parameter in self._parameters]

    @property
    def named_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters by the names that users see."""
        return dict(self._parameters)

    def gradient_norms(self) -> dict[str, GradientNorm]:
        """Return the norms of all gradients, by parameter name."""
        if self._shards is not None:
            names = {parameter: name for name, parameter in self._parameters}
            return {names[parameter]: norm for parameter, norm in self._shards.norms()}
        gradients = {name: parameter.grad for name, parameter in self._parameters if parameter.grad is not None}
        return dict(zip(gradients, norms_of(gradients.values()), strict=True))

    def examine(self, report: Report, config: PipelineConfig, scale: float | None) -> None:
        """Report what all stages must know of each other's gradients before they update; take out the losses' factor.

        Raises:
            PipelineError: parameters that were frozen at the start have gradients now, and no optimizer.
        """
        self._refuse_unfrozen()
        if scale is not None:
            report.overflowed = self._unscale_gradients(scale)
        if config.clip_grad_norm is not None:
            report.gradient_norms = self.gradient_norms()
        if config.on_nan != "ignore" and scale is None:
            report.overflowed = not self.has_finite_gradients(report.gradient_norms)

    def has_finite_gradients(self, norms: Mapping[str, GradientNorm] = MappingProxyType({})) -> bool:
        """Return whether no gradient holds NaN or infinity. norms: of the gradients, if they are known."""
        gradients = [dense(gradient) for gradient in self._gradients(self.parameters)]
        found = list(norms.values()) or norms_of(gradients)
        if not found or bool(torch.stack([norm for norm, _ in found]).isfinite().all()):
            return True
        return all(is_finite(gradient) for gradient in gradients)  # a norm of finite gradients may be infinite

    def _unscale_gradients(self, factor: float) -> bool:
        """Divide the gradients by the losses' factor; return whether one is not finite: then the step must be skipped.

        Like GradScaler it leaves out parameters that the optimizer does not have.
        """
        groups = self._optimizer.param_groups if self._optimizer is not None else []
        return unscale(self._gradients(parameter for group in groups for parameter in group["params"]), factor)

    def _gradients(self, parameters: Iterable[nn.Parameter]) -> list[Tensor]:
        """Return the gradients of these parameters that there are; of those in shards the own part."""
        if isinstance(self._shards, BlockShards):
            found = self._shards.gradients()
            return [found[parameter] for parameter in parameters if parameter in found and found[parameter].numel()]
        return [parameter.grad for parameter in parameters if parameter.grad is not None]

    def step(
        self,
        step: int,
        total_norm: Tensor | None,
        max_norm: float | None,
        *,
        skip: bool = False,
    ) -> None:
        """Clip as torch.nn.utils.clip_grad_norm_ does, with the norm over all stages; then one optimizer step."""
        if self._optimizer is None:
            self.clear_gradients()
            return
        self.update_progress, versions = UpdateProgress.NOT_BEGUN, versions_of(self.parameters)
        try:
            if max_norm is not None and total_norm is not None:
                if self._shards is not None:
                    self._shards.clip(max_norm, total_norm)
                else:
                    nn.utils.clip_grads_with_norm_(self.parameters, max_norm, total_norm)
            if not skip:
                self._step_optimizer(step, 0)
                if self._shards is not None:
                    self._shards.share_updates()
                if self._states is not None:
                    self._states.note_writes(to_shards=False)
            self.update_progress = UpdateProgress.WITHOUT_SCHEDULER
            self.step_scheduler()
            self.update_progress = UpdateProgress.DONE
        finally:
            if self.update_progress is UpdateProgress.NOT_BEGUN and versions_of(self.parameters) != versions:
                self.update_progress = UpdateProgress.PARTIAL
            self.clear_gradients()  # else the next step would add to them

    def update(self, step: int, index: int) -> None:
        """Do one update of an asynchronous step."""
        self._step_optimizer(step, index)
        self.clear_gradients()

    def note_changed_parameters(self) -> None:
        """Note that a user's function may have written to the parameters, also without a new version of them."""
        if self._states is not None:
            self._states.note_writes(to_shards=True)

    def step_scheduler(self) -> None:
        """Step the scheduler, once a step whatever its number of updates, unless it waits for a metric."""
        if self._lr_scheduler is not None and not self.waits_for_metric:
            self._lr_scheduler.step()

    def scheduler_kind(self) -> str | None:
        """Return the class of the scheduler; None: there is none."""
        return kind_of(self._lr_scheduler) if self._lr_scheduler is not None else None

    def step_scheduler_by(self, metric: float) -> None:
        """Step a scheduler that waits for a metric."""
        if self.waits_for_metric:
            self._lr_scheduler.step(metric)

    def learning_rates(self) -> dict[str, float]:
        """Return the learning rates of the next step, by parameter, where the optimizer has learning rates."""
        trained = {name: group for group, name, parameter in self._grouped() if parameter.requires_grad}
        return {name: float(trained[name]["lr"]) for name, _ in self._parameters if "lr" in trained.get(name, ())}

    def scale_gradients(self, factor: float) -> None:
        """Multiply all gradients."""
        for _, parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    def bytes(self) -> tuple[int, int, int]:
        """Return the bytes of the parameters, of the gradients, and of the optimizer's state, between two blocks."""
        parameters = [parameter for _, parameter in self._parameters]
        gradients = self._gradients(parameters)
        held: Iterable[Tensor] = parameters
        if self._shards is not None and self._shards.zero == 3:
            held = [shard.elements for shard in self._shards.own().values()]
        states = self._state().values()
        values = [value for values in states for value in values.values()]
        state = [part for value in values for part in (value.values if isinstance(value, TensorPart) else (value,))]
        state = [value for value in state if isinstance(value, Tensor)]
        return _bytes(held), _bytes(gradients), _bytes(state)

    def clear_gradients(self) -> None:
        """Drop the gradients of all parameters, also of those that the optimizer does not have."""
        if self._shards is not None:
            self._shards.clear_gradients()
        for _, parameter in self._parameters:
            parameter.grad = None

    def check(self, saved: Saved) -> list[str]:
        """Return the trained parameters without optimizer state in the checkpoint: they were frozen, or are new.

        Raises:
            PipelineError: the checkpoint has other dtypes, optimizers, parameter groups, or another scheduler.
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
        """Set optimizer and scheduler to what was saved; the stages load the weights."""
        saved = saved._replace(optimizer=self._with_fresh(saved.optimizer))
        self._restore_optimizer(saved.optimizer)
        if self._lr_scheduler is not None and saved.lr_scheduler is not None:
            self._lr_scheduler.load_state_dict(self._for_own_groups(saved.lr_scheduler, saved.optimizer))
        elif self._optimizer is not None and self._scheduler_factory is not None:
            # It was trained without a scheduler. The one that was made at the start had set its first rates, such as a
            # warmup's; the saved ones have replaced them. A scheduler that multiplies the last rate needs its own.
            for group, name, _ in self._grouped():
                if name in saved.optimizer and "initial_lr" not in saved.optimizer[name]["options"]:
                    group.pop("initial_lr", None)
            self._lr_scheduler = make_scheduler(self._scheduler_factory, self._optimizer)

    def _step_optimizer(self, step: int, update: int) -> None:
        """Step the optimizer. Replicas, other runs and resumed runs draw the same random numbers (SGLD's noise)."""
        if self._optimizer is not None:
            with step_rng(self._seed, self._place, step, update):
                if self._states is not None and self._shards is not None:
                    self._states.step(self._shards.gradients())
                else:
                    self._optimizer.step()

    def optimizer_state(self) -> dict[str, dict[str, Any]]:
        """Return each parameter's optimizer state, and the options of its group, which the scheduler changes.

        It is not copied, and by parameter name, so that any cut can take it.
        """
        if self._optimizer is None:
            return {}
        if self._states is None:
            refuse_hidden_state(self._optimizer)
        names = {id(parameter): name for name, parameter in self._parameters}
        groups, scheduler = self._optimizer.param_groups, self.scheduler_state() or {}
        states = self._state()
        found: dict[str, dict[str, Any]] = {}
        for index, group in enumerate(groups):
            of_group = {"options": _options(group), "schedule": values_of_group(scheduler, len(groups), index)}
            if group["params"]:
                of_group["group"] = type(self._optimizer).__name__, names[id(group["params"][0])]
            for parameter in group["params"]:
                found[names[id(parameter)]] = {"state": dict(states.get(parameter, {})), **of_group}
        return found

    def _state(self) -> Mapping[Tensor, Mapping[str, Any]]:
        """Return the optimizer's state by parameter, without copying it; TensorParts where it has shards."""
        if self._states is not None:
            return {parameter: state.parts(parameter) for parameter, state in self._states.states().items()}
        return state_of(self._optimizer) if self._optimizer is not None else {}

    def own_boxes(self) -> dict[str, tuple[tuple[int, ...], tuple[Box, ...]]]:
        """Return the shapes of the parameters, and the boxes of their state that this replica has, if it has shards."""
        if self._shards is None:
            return {}
        return {
            name: (shape, boxes_of_range(shape, *self._shards.range_of(parameter), memory_order(parameter)))
            for name, parameter in self._parameters
            if (shape := tuple(parameter.shape))
        }

    def scheduler_state(self) -> dict[str, Any] | None:
        """Return the scheduler's state; None: there is no scheduler."""
        return self._lr_scheduler.state_dict() if self._lr_scheduler is not None else None

    def _refuse_unfrozen(self) -> None:
        unfrozen = [name for name, parameter in self._parameters if parameter.grad is not None]
        if self._optimizer is None and unfrozen:
            raise PipelineError(
                f"{', '.join(unfrozen)}: these have gradients now, but the stage has no optimizer: all "
                "its parameters were frozen at the start. Cut so that something in the stage is trained from the "
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
        """Return the names of trained parameters: a stage that has frozen ones only saves no optimizer state."""
        return [name for _, name, parameter in self._grouped() if parameter.requires_grad]

    def _with_fresh(self, saved: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """Add what trained parameters begin with that were not saved: no state, and saved options.

        The options, which the scheduler changes, are those of a saved parameter in the same group on this worker. If
        there is none, they are those of all saved parameters, if these are equal: a single group, as one process would
        have. Otherwise the group keeps its own.
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
                options, state = saved[name]["options"], saved[name]["state"]
                if self._states is None:
                    state = on_device_of(parameter, state, {**group, **options})
                of_parameters[parameter] = OfParameter(state, options)
        if self._states is None:
            restore(self._optimizer, of_parameters)
            return
        for group, _, parameter in self._grouped():
            if parameter in of_parameters:
                group.update(of_parameters[parameter].options)
        self._states.take_whole({parameter: state for parameter, (state, _) in of_parameters.items()})

    def _grouped(self) -> Iterator[tuple[dict[str, Any], str, nn.Parameter]]:
        """Yield the optimizer's parameters, each with its group and its name."""
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
