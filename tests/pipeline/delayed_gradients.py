"""A single-process simulation of asynchronous pipelines: PipeDream's formulas, to the letter.

w(t + 1) = w(t) - lr * gradient(w_1(t - n + 1), ..., w_n(t)) of stages 1 to n (Narayanan et al., 2019, section 3.3);
with vertical sync all of them are w_i(t - n + 1); PipeDream-2BW has w(t - 1) on all stages (2021, section 3.1).
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import lp_pipe.pipeline as pp
from tests.pipeline.plain_loop import chunk, layers_of, needs_metric


@dataclass(frozen=True)
class Rule:
    """The rule of one stage: micro-batches per update, updates before one counts, replicas with sums of their own."""

    every: int
    delay: int
    replicas: int = 1


def stashed(stages: int) -> list[Rule]:
    return [Rule(1, stages - 1 - stage) for stage in range(stages)]


def synced(stages: int) -> list[Rule]:
    return [Rule(1, stages - 1)] * stages


def buffered(stages: int) -> list[Rule]:
    return [Rule(stages, min(1, stages - 1))] * stages


class DelayedLoop:
    """A loop that trains a pp.Model with stages from layers 0, *cuts, one micro-batch after the other.

    Where stages update after different numbers of micro-batches, they take the mean of these.
    """

    def __init__(self, model: pp.Model, cuts: Sequence[int], microbatches: int, rules: Sequence[Rule]) -> None:
        torch.set_num_threads(1)  # as a stage has by default
        layers = layers_of(model)
        self.model = model
        self.rules = rules
        self.is_uniform = len({rule.every for rule in rules}) == 1
        self.microbatches = microbatches
        self.module = nn.Sequential(*layers)
        bounds = list(zip([0, *cuts], [*cuts, len(layers)], strict=True))
        self.parameters = [
            [(n, p) for n, p in self.module.named_parameters() if first <= int(n.split(".")[0]) < end]
            for first, end in bounds
        ]
        self.optimizers = [model.optimizer(list(own)) if own else None for own in self.parameters]
        self.schedulers = [
            model.lr_scheduler(o) if model.lr_scheduler is not None and o is not None else None for o in self.optimizers
        ]
        self.history = [[self._weights(stage)] for stage in range(len(rules))]
        self.sums: list[dict[int, list[Tensor]]] = [{} for _ in rules]
        self.step_index = 0

    def step(self, batch: tuple[Tensor, Tensor]) -> float:
        xs, ys = (chunk(part, self.microbatches) for part in batch)
        first_groups = [len(versions) - 1 for versions in self.history]
        total = 0.0
        for j, (x, y) in enumerate(zip(xs, ys, strict=True)):
            for stage, rule in enumerate(self.rules):
                version = max(0, first_groups[stage] + j // rule.every - rule.delay)
                self._set(stage, self.history[stage][version])
            loss = self.model.loss(self._forward(x, j), y)
            total += loss.item() * (len(y) / sum(map(len, ys)))
            (loss * self._weight(j, ys)).backward()
            for stage, rule in enumerate(self.rules):
                self._set_aside(stage, j % rule.replicas)
                self._set(stage, self.history[stage][-1])
                if (j + 1) % rule.every == 0 or j + 1 == len(ys):
                    self._update(stage, mean_of=1 if self.is_uniform else j % rule.every + 1)
        for scheduler in self.schedulers:
            if scheduler is not None and not needs_metric(scheduler):
                scheduler.step()
        self.step_index += 1
        return total

    def evaluate(self, batch: tuple[Tensor, Tensor]) -> float:
        module = copy.deepcopy(self.module).eval()
        with torch.no_grad():
            return float(self.model.loss(module(batch[0]), batch[1]))

    def _weight(self, microbatch: int, ys: Sequence[Tensor]) -> float:
        if not self.is_uniform:
            return 1.0
        first = microbatch - microbatch % self.rules[0].every
        return len(ys[microbatch]) / sum(map(len, ys[first : first + self.rules[0].every]))

    def _set_aside(self, stage: int, replica: int) -> None:
        gradients = [parameter.grad for _, parameter in self.parameters[stage]]
        known = self.sums[stage].get(replica)
        self.sums[stage][replica] = [
            gradient if known is None else known[index] + gradient for index, gradient in enumerate(gradients)
        ]
        for _, parameter in self.parameters[stage]:
            parameter.grad = None

    def _update(self, stage: int, mean_of: int) -> None:
        by_replica = [self.sums[stage][replica] for replica in sorted(self.sums[stage])]
        self.sums[stage].clear()
        for (_, parameter), (first, *others) in zip(self.parameters[stage], zip(*by_replica, strict=True), strict=True):
            for other in others:
                first = first + other
            parameter.grad = first * (1 / mean_of)
        optimizer = self.optimizers[stage]
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        self.history[stage].append(self._weights(stage))

    def state_dict(self) -> dict[str, Tensor]:
        return copy.deepcopy(self.module.state_dict())

    def _forward(self, value: Any, microbatch: int) -> Any:
        for index, layer in enumerate(self.module):
            with pp.step_rng(self.model.seed, index, self.step_index, microbatch):
                value = layer(value)
        return value

    def _weights(self, stage: int) -> list[Tensor]:
        return [parameter.detach().clone() for _, parameter in self.parameters[stage]]

    def _set(self, stage: int, weights: list[Tensor]) -> None:
        for (_, parameter), weight in zip(self.parameters[stage], weights, strict=True):
            parameter.data = weight.clone()
