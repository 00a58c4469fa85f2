"""API.md's single-process loop, to the letter: what every pipeline must equal to the bit.

And the models that tests train with it.

Shapes: B samples, T tokens, D features.
"""

import copy
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

import lp_pipe as lp
import lp_pipe.pipeline as pp

T = 3
D = 8


class PlainLoop:
    """Trains a pp.Model in this process, with plain torch."""

    def __init__(
        self,
        model: pp.Model,
        microbatches: int,
        clip_grad_norm: float | None = None,
        precision: str = "fp32",
        replicas: Sequence[int] | None = None,
        device: str = "cpu",
    ) -> None:
        """replicas: of each layer's stage; None: 1."""
        torch.set_num_threads(1)  # as a stage has by default
        self.model = model
        self.microbatches = microbatches
        self.clip_grad_norm = clip_grad_norm
        self.replicas = replicas
        self.precision = precision
        self.device = torch.device(device)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=precision == "fp16")
        self.layers = layers_of(model)
        self.module = nn.Sequential(*self.layers).to(self.device)
        self.optimizer = model.optimizer(list(self.module.named_parameters()))
        self.lr_scheduler = model.lr_scheduler(self.optimizer) if model.lr_scheduler else None
        self.steps_done = 0
        self.sums: dict[str, dict[int, Tensor]] = {}
        self.grad_norm: float | None = None  # of the last step, before clipping

    def step(self, batch: tuple[Any, Any]) -> float:
        xs, ys = (chunk(self._on_device(part), self.microbatches) for part in batch)
        weights = [self._weight(y, ys) for y in ys]
        total = 0.0
        for j, (x, y, weight) in enumerate(zip(xs, ys, weights, strict=True)):
            with self._autocast():
                output = self._forward(x, j)
                with pp.step_rng(self.model.seed, len(self.layers), self.steps_done, j):
                    loss = self._loss(output, y)
            total += loss.item() * weight
            self.scaler.scale(loss * weight).backward()
            self._set_aside(j)
        self._sum_up()
        self.scaler.unscale_(self.optimizer)
        if self.clip_grad_norm is not None:
            self.grad_norm = nn.utils.clip_grad_norm_(self.module.parameters(), self.clip_grad_norm).item()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.lr_scheduler is not None and not needs_metric(self.lr_scheduler):
            self.lr_scheduler.step()
        self.optimizer.zero_grad()
        self.steps_done += 1
        return total

    def steps(self, batches: Sequence[tuple[Any, Any]]) -> list[float]:
        return [self.step(batch) for batch in batches]

    def output(self, x: Any) -> Any:
        """Compute in eval mode; a module that was in eval mode before stays so."""
        modes = {module: module.training for module in self.module.modules()}
        self.module.eval()
        x = self._on_device(x)
        with torch.no_grad(), self._autocast():
            for layer in self.layers:
                x = layer(x)
        for module, mode in modes.items():
            module.training = mode
        return x

    def evaluate(self, batch: tuple[Any, Any]) -> float:
        output = self.output(batch[0])
        with self._autocast():
            return float(self._loss(output, self._on_device(batch[1])))

    def learning_rates(self) -> dict[str, float]:
        """Return the learning rates of the next step."""
        rates = {parameter: group["lr"] for group in self.optimizer.param_groups for parameter in group["params"]}
        return {name: float(rates[p]) for name, p in self.module.named_parameters() if p.requires_grad}

    def state_dict(self) -> dict[str, Tensor]:
        return {name: value.cpu() for name, value in self.module.state_dict().items()}

    def _on_device(self, value: Any) -> Any:
        return tree_map_only(Tensor, lambda tensor: tensor.to(self.device), value)

    def _set_aside(self, microbatch: int) -> None:
        """Keep each replica's sums apart."""
        if self.replicas is None:
            return
        for name, parameter in self.module.named_parameters():
            if parameter.grad is not None:
                sums = self.sums.setdefault(name, {})
                replica = microbatch % self.replicas[int(name.split(".")[0])]
                sums[replica] = sums[replica] + parameter.grad if replica in sums else parameter.grad
                parameter.grad = None

    def _sum_up(self) -> None:
        for name, sums in self.sums.items():
            first, *others = [sums[replica] for replica in sorted(sums)]
            for other in others:
                first = first + other
            self.module.get_parameter(name).grad = first
        self.sums.clear()

    def _autocast(self) -> Any:
        dtype = torch.float16 if self.precision == "fp16" else torch.bfloat16
        return torch.autocast(self.device.type, dtype, enabled=self.precision != "fp32", cache_enabled=False)

    def _forward(self, x: Any, microbatch: int) -> Any:
        for i, layer in enumerate(self.layers):
            with pp.step_rng(self.model.seed, i, self.steps_done, microbatch):
                x = layer(x)
        return x

    def _loss(self, output: Any, target: Any) -> Tensor:
        result = self.model.loss(output, target)
        loss: Tensor = result[0] if isinstance(result, tuple) else result
        return loss

    def _weight(self, y: Any, ys: list[Any]) -> float:
        if self.model.loss_weight == "one":
            return 1.0
        weigh: Any = len if self.model.loss_weight == "samples" else self.model.loss_weight
        return float(weigh(y)) / sum(float(weigh(other)) for other in ys)


def needs_metric(scheduler: Any) -> bool:
    """Return whether the scheduler is stepped with a metric by the user, as ReduceLROnPlateau is."""
    parameters = inspect.signature(scheduler.step).parameters.values()
    return any(parameter.default is inspect.Parameter.empty for parameter in parameters)


def layers_of(model: pp.Model) -> list[nn.Module]:
    """Factories and functions under their seeds, ready-made modules as copies."""
    if inspect.isgeneratorfunction(model.layers):
        iterator, layers = model.layers(), []
        while True:
            with pp.layer_rng(model.seed, len(layers)):
                layer = next(iterator, None)
            if layer is None:
                return layers
            layers.append(layer)
    if callable(model.layers) and not isinstance(model.layers, nn.Module):
        with pp.layer_rng(model.seed, 0):
            return list(model.layers())
    layers = []
    for index, layer in enumerate(model.layers):
        with pp.layer_rng(model.seed, index):
            layers.append(layer.build() if isinstance(layer, pp.Layer) else layer)
    return copy.deepcopy(layers)


def chunk(value: Any, microbatches: int) -> list[Any]:
    """torch.chunk, also inside of tuples and dicts."""
    if isinstance(value, Tensor):
        return list(value.chunk(microbatches))
    if isinstance(value, dict):
        return [dict(zip(value, parts, strict=True)) for parts in chunk(tuple(value.values()), microbatches)]
    return list(zip(*(chunk(part, microbatches) for part in value), strict=True))


def assert_same_state(got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> None:
    """Every bit, every name, in this order."""
    assert list(got) == list(want)
    differing = {name: _distance(got[name], want[name]) for name in want if not torch.equal(got[name], want[name])}
    assert not differing, f"largest differences: {differing}"


def _distance(a: Tensor, b: Tensor) -> object:
    return float((a.double() - b.double()).abs().max()) if a.shape == b.shape else (a.shape, b.shape)


class Feeder:
    """Gives ready-made batches."""

    def __init__(self, batches: Sequence[tuple[Any, Any]]) -> None:
        self._batches = batches

    def batch(self, step: int) -> tuple[Any, Any] | None:
        return self._batches[step] if step < len(self._batches) else None


def random_batches(sizes: Sequence[int], *shape: int) -> list[tuple[Tensor, Tensor]]:
    """Return one batch for each size; each position has another one."""
    generator = torch.Generator().manual_seed(len(sizes))
    shape = shape or (T, D)
    return [
        (torch.randn(size, *shape, generator=generator), torch.randn(size, *shape, generator=generator))
        for size in sizes
    ]


@contextmanager
def launched(
    mode: str, model: pp.Model, feeder: Sequence[tuple[Any, Any]] | Any = None, **options: Any
) -> Iterator[pp.PipelineClient]:
    """A program with one pipeline, and a feeder if there are batches or an object to feed them."""
    with launched_many(mode, [(model, feeder, options)]) as (client,):
        yield client


@contextmanager
def launched_many(
    mode: str, pipelines: Sequence[tuple[pp.Model, Any, dict[str, Any]]]
) -> Iterator[list[pp.PipelineClient]]:
    """Several pipelines in one program: starting one is what costs time."""
    program = lp.Program("pipelines")
    feeders: dict[int, lp.CourierHandle] = {}  # pipelines that are given the same batches share a node
    handles = []
    for index, (model, feeder, options) in enumerate(pipelines):
        if feeder is not None and id(feeder) not in feeders:
            node = lp.CourierNode(Feeder, feeder) if isinstance(feeder, Sequence) else lp.CourierNode(feeder)
            feeders[id(feeder)] = program.add_node(node, label=f"feeder{len(feeders)}")
        group = f"stages{index}" if len(pipelines) > 1 else "stages"
        handles.append(pp.add_pipeline(program, model, group=group, inputs=feeders.get(id(feeder)), **options))
    with lp.launch(program, mode) as run:
        yield [run.client(handle) for handle in handles]


# Models.


def layers_with_everything() -> list[pp.Layer]:
    """Nine layers, [B, T, D] -> [B, T, D], with dropout, a BatchNorm and an in-place layer."""
    return [
        pp.Layer(nn.Linear, D, D),
        pp.Layer(nn.Tanh),
        pp.Layer(nn.Dropout, 0.2),
        pp.Layer(nn.BatchNorm1d, T),
        pp.Layer(nn.Linear, D, 2 * D),
        pp.Layer(nn.ReLU, inplace=True),
        pp.Layer(nn.LayerNorm, 2 * D),
        pp.Layer(nn.Dropout, 0.5),
        pp.Layer(nn.Linear, 2 * D, D),
    ]


def squared_error(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean()


def squared_error_and_metrics(output: Tensor, target: Tensor) -> tuple[Tensor, dict[str, Any]]:
    return squared_error(output, target), {"mae": (output - target).abs().mean(), "count": len(target)}


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-2, weight_decay=0.1)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def halve_every_two_steps(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)


def model_with_everything(**options: Any) -> pp.Model:
    return pp.Model(
        **{
            "layers": layers_with_everything(),
            "loss": squared_error_and_metrics,
            "optimizer": adam,
            "lr_scheduler": halve_every_two_steps,
            "seed": 5,
            **options,
        }
    )


def without_batch_norm(**options: Any) -> pp.Model:
    """Return such a model for replicas, where BatchNorm's statistics are replica 0's and no plain loop's."""
    layers = [layer for layer in layers_with_everything() if layer.name != "BatchNorm1d"]
    return model_with_everything(layers=layers, **options)
