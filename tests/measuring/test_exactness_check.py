"""pp.check: a model trains the same both ways, or the report says where it does not."""

import math
import random
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lp_pipe.pipeline as pp
from tests.pipeline.plain_loop import (
    D,
    T,
    adam,
    assert_same_state,
    model_with_everything,
    random_batches,
    sgd,
    squared_error,
)

pytestmark = pytest.mark.usefixtures("no_leaks")

BATCHES = random_batches([6, 5])


def test_a_model_that_trains_the_same_both_ways_is_equal() -> None:
    report = pp.check(model_with_everything(), BATCHES, stages=3, microbatches=4, clip_grad_norm=0.1)
    assert report and report.equal
    assert str(report) == "equal: the pipeline and the plain loop have the same bits after 2 steps"


def test_batches_may_be_a_generator_and_the_device_torchs_own() -> None:
    report = pp.check(model_with_everything(), iter(BATCHES), stages=2, microbatches=2, device=torch.device("cpu"))
    assert report.equal and report.steps == len(BATCHES)


@pytest.mark.parametrize("layers", ["layers", "function"])
def test_the_stages_may_be_a_plan(layers: str) -> None:
    """It was refused as one for another model, whose layers are called _Watched."""
    made = [pp.Layer(nn.Linear, D, D, name="first"), nn.Tanh(), nn.Linear(D, D), nn.Tanh()]
    model = pp.Model(made if layers == "layers" else lambda: [nn.Linear(D, D), nn.Tanh()], squared_error, sgd)
    topology = pp.Topology([pp.Level("device", count=2, bandwidth=1e12)])
    plan = pp.partition(pp.profile(model, *BATCHES[0]), topology, straight=True)
    assert pp.check(model, BATCHES, stages=plan, microbatches=2).equal


def weights_only(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for name, parameter in parameters if name.endswith("weight")], lr=0.1)


def test_gradients_that_the_optimizer_does_not_know_count_once() -> None:
    # The plain loop kept them from step to step, where they counted in the norm again: equal models were "different".
    model = pp.Model([nn.Linear(D, D), nn.Linear(D, D)], squared_error, weights_only)
    assert pp.check(model, BATCHES, stages=2, microbatches=2, clip_grad_norm=0.01).equal


def test_gradients_that_the_optimizer_does_not_know_skip_no_step() -> None:
    # GradScaler looks at the optimizer's only. Here only the last bias has one beyond float16.
    layers = [nn.Linear(D, D, bias=False), nn.Linear(D, D)]
    model = pp.Model(layers, lambda y, t: (y * 1.5).sum() * 0.5 + 0 * t.sum(), weights_only, loss_weight="one")
    batches = [(x * 1e-3, t) for x, t in BATCHES]
    assert pp.check(model, batches, stages=2, microbatches=2, precision="fp16").equal


class Jitters(nn.Module):
    """Draws from a generator that step_rng knows nothing of."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + random.random())


def test_a_layer_that_draws_from_elsewhere_is_named() -> None:
    model = pp.Model([nn.Linear(D, D), nn.Tanh(), Jitters(), nn.Linear(D, D)], squared_error, adam)
    report = pp.check(model, BATCHES, stages=2, microbatches=2)
    assert not report and not report.equal  # `assert pp.check(…)` is what one writes in a test
    assert (report.step, report.microbatch, report.layer) == (0, 0, 2)
    assert report.max_difference is not None and 0 < report.max_difference < 2
    assert str(report).startswith("different in step 0: layer 2 (Jitters) is the first whose output differs, by up to ")


class Counts(nn.Module):
    """Counts its calls in an object that it shares with another layer: with a copy of it on another stage."""

    def __init__(self, calls: list[int]) -> None:
        super().__init__()
        self.calls = calls

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(1)
        return x / len(self.calls)


def test_python_state_shared_across_stages_is_named() -> None:
    calls: list[int] = []
    model = pp.Model([Counts(calls), nn.Linear(D, D), nn.Tanh(), Counts(calls)], squared_error, sgd)
    assert pp.check(model, BATCHES, stages=1, microbatches=2).equal
    report = pp.check(model, BATCHES, stages=[2], microbatches=2)
    assert (report.equal, report.step, report.microbatch, report.layer) == (False, 0, 0, 3)
    assert calls == []


def test_an_optimizer_that_looks_at_other_parameters_is_found_by_what_it_changes() -> None:
    """Each stage has an optimizer of its own, so that a rate by the number of parameters is another one there."""

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1 / len(parameters))

    layers = [nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D)]
    report = pp.check(pp.Model(layers, squared_error, optimizer), BATCHES, stages=2, microbatches=2)
    assert (report.equal, report.step, report.layer, report.name) == (False, 0, None, "0.weight")
    assert "0.weight (of layer 0) is the first parameter or buffer that differs" in str(report)


def test_a_loss_that_is_no_function_is_found() -> None:
    losses = iter(range(1, 100))
    model = pp.Model([nn.Linear(D, D)], lambda output, target: squared_error(output, target) * next(losses), sgd)
    report = pp.check(model, BATCHES, stages=1, microbatches=1)
    assert (report.equal, report.layer, report.name) == (False, None, None)
    assert "all layers are equal, but the losses are" in str(report)


def test_a_loss_that_draws_is_equal_and_one_with_a_generator_of_its_own_is_asked_about() -> None:
    """Noise of a diffusion, a VAE's sample."""

    def model(generator: torch.Generator | None) -> pp.Model:
        def loss(output: Tensor, target: Tensor) -> Tensor:
            return squared_error(output, torch.randn(target.shape, generator=generator))

        return pp.Model([nn.Linear(D, D), nn.Linear(D, D)], loss, sgd)

    assert pp.check(model(None), BATCHES, stages=2, microbatches=2).equal
    report = pp.check(model(torch.Generator().manual_seed(0)), BATCHES, stages=1, microbatches=1)
    assert "a generator of its own" in str(report)


def _shared() -> list[nn.Module]:
    linear = nn.Linear(D, D)
    return [linear, nn.Dropout(0.5), linear, nn.BatchNorm1d(3)]


class Keeps(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x.sin()


class Adds(nn.Module):
    def forward(self, x: Tensor, value: Tensor) -> Tensor:
        return x + value


def _generator() -> Any:
    yield pp.Stash("a", Keeps())
    yield nn.Linear(D, D)
    yield pp.Pop("a", Adds())
    yield nn.Linear(D, D)


MODELS: dict[str, Any] = {
    "one layer twice": _shared(),
    "a function": _shared,
    "a generator with skips": _generator,
    "factories with skips": [
        pp.Stash("a", pp.Layer(Keeps)),
        pp.Layer(nn.Linear, D, D),
        pp.Layer(pp.Pop, "a", pp.Layer(Adds)),
        pp.Layer(nn.Linear, D, D),
    ],
}


@pytest.mark.parametrize("name", MODELS)
def test_every_form_of_a_model_can_be_checked(name: str) -> None:
    report = pp.check(pp.Model(MODELS[name], squared_error, adam), BATCHES, stages=3, microbatches=3, schedule="gpipe")
    assert report.equal, report


class RunningMean(nn.Module):
    """Takes off what its buffer says that the inputs' mean is."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.5 * self.mean + 0.5 * x.detach().mean()
        return x - self.mean


def test_buffers_of_replicas_can_be_checked() -> None:
    model = pp.Model([nn.Linear(D, D), nn.BatchNorm1d(T), RunningMean(), nn.Linear(D, D)], squared_error, adam)
    batches = random_batches([12, 3, 12])
    assert pp.check(model, batches, stages=2, replicas=(2, 3), microbatches=6).equal
    assert pp.check(model, batches, stages=1, replicas=2, microbatches=6, recompute="full").equal


class Watched(nn.Linear):
    """Keeps a mean of its output's gradients, to which backwards write."""

    def __init__(self) -> None:
        super().__init__(D, D)
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        y.register_hook(self.seen)
        return y

    def seen(self, gradient: Tensor) -> None:
        self.mean = 0.5 * self.mean + 0.5 * gradient.mean()


def test_buffers_to_which_the_backwards_of_replicas_write_can_be_checked() -> None:
    """The plain loop's wrote to those of the first replica."""
    model = pp.Model([Watched(), nn.Linear(D, D)], squared_error, adam)
    report = pp.check(model, random_batches([12, 3]), stages=2, replicas=(2, 1), microbatches=6)
    assert report.equal, report


class AgainstMean(nn.Module):
    """A loss that keeps a mean of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = RunningMean()

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return squared_error(self.mean(output), target)


def test_buffers_of_a_loss_on_replicas_can_be_checked() -> None:
    """The plain loop had one for all replicas, and each replica's micro-batches go on from their own."""
    model = pp.Model([nn.Linear(D, D), nn.Linear(D, D)], AgainstMean(), adam)
    report = pp.check(model, random_batches([12, 3, 12]), stages=2, replicas=(1, 2), microbatches=6)
    assert report.equal, report


def test_tied_parameters_can_be_checked() -> None:
    layers = [pp.Layer(nn.Linear, D, D), pp.Layer(nn.Tanh), pp.Layer(nn.Linear, D, D)]
    model = pp.Model(layers, squared_error, adam, tied=[("0.weight", "2.weight")])
    assert pp.check(model, BATCHES, stages=2, microbatches=2).equal


def test_numbers_that_are_none_in_both_are_equal() -> None:
    model = pp.Model([nn.Linear(D, D)], lambda output, target: (output * math.nan).mean(), sgd)
    assert pp.check(model, BATCHES, stages=1, microbatches=2).equal


class Inverse(nn.Module):
    """Finite, but for a slope at 0."""

    def forward(self, x: Tensor) -> Tensor:
        return x.abs().sqrt()


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step\\(\\)`")  # when the first step is skipped
@pytest.mark.parametrize(
    "options",
    [{}, {"clip_grad_norm": 0.1, "schedule": "zb_h1"}, {"replicas": 2}, {"precision": "fp16"}, {"recompute": "full"}],
    ids=["plain", "clipped", "replicas", "fp16", "recompute"],
)
@pytest.mark.parametrize("bad", ["loss", "gradient"])
def test_steps_that_are_skipped_because_a_number_is_none_are_so_in_both(bad: str, options: dict[str, Any]) -> None:
    """The plain loop did not skip them: every such model was "different", by NaN."""
    x, y = random_batches([12])[0]
    wrong = (x * math.inf, y) if bad == "loss" else (x * 0.0, y)
    layers: list[Any] = [pp.Layer(nn.Linear, D, D, bias=False), pp.Layer(Inverse), pp.Layer(nn.BatchNorm1d, T)]
    layers += [pp.Layer(nn.Dropout, 0.2), pp.Layer(nn.Linear, D, D)]
    model = model_with_everything(layers=layers, optimizer=sgd)
    batches = [wrong, *BATCHES, wrong, *BATCHES]
    assert pp.check(model, batches, stages=2, microbatches=4, on_nan="skip", **options).equal
    if options.get("precision") != "fp16":
        assert pp.check(model, batches, stages=2, microbatches=4, **options).equal  # NaN in both from then on


def test_a_table_with_a_largest_norm_is_as_before_a_step_that_is_skipped() -> None:
    layers = [pp.Layer(nn.Embedding, 20, D, max_norm=0.5), pp.Layer(nn.Linear, D, D)]
    generator = torch.Generator().manual_seed(0)
    batches = [
        (torch.randint(20, (8, T), generator=generator), torch.randn(8, T, D, generator=generator)) for _ in range(3)
    ]
    batches[1] = batches[1][0], batches[1][1] * math.nan
    model = pp.Model(layers, squared_error, sgd)
    assert pp.check(model, batches, stages=2, microbatches=4, on_nan="skip").equal


class ToSparse(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.to_sparse()


class ToDense(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.to_dense()


def test_sparse_outputs_can_be_checked() -> None:
    """Torch cannot compare them as they are, and said so."""
    model = pp.Model([nn.Linear(D, D), ToSparse(), ToDense(), nn.Linear(D, D)], squared_error, adam)
    assert pp.check(model, random_batches([4]), stages=[3], microbatches=2).equal


def test_a_check_leaves_the_users_modules_and_threads_alone() -> None:
    module = nn.Sequential(nn.Linear(D, D), nn.Linear(D, D))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    threads = torch.get_num_threads()
    for layers in (module, lambda: module):
        assert pp.check(pp.Model(layers, squared_error, adam), BATCHES, stages=2).equal
    assert_same_state(module.state_dict(), before)
    assert torch.get_num_threads() == threads


def test_an_optimizer_that_is_refused_is_the_same_error_as_elsewhere() -> None:
    # It was the Unavailable of a stage that had failed, with the PipelineError in its text.
    model = pp.Model([nn.Linear(D, D)], squared_error, lambda named: torch.optim.LBFGS([value for _, value in named]))
    with pytest.raises(pp.PipelineError, match=r"^LBFGS needs a closure"):
        pp.check(model, BATCHES, stages=1)


def test_without_batches_there_is_nothing_to_check() -> None:
    with pytest.raises(pp.PipelineError, match="at least one"):
        pp.check(model_with_everything(), [])


@pytest.mark.slow
def test_a_compiled_layer_is_equal_too() -> None:
    # In a process of its own, where torch has not imported its compiler yet: one stage did so for torch.compile, the
    # other one for its optimizer, and both found half-made modules.
    script = """
import torch
from torch import nn
import lp_pipe.pipeline as pp

def compiled():
    return torch.compile(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.3)))

def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)

batch = torch.randn(8, 8), torch.randn(8, 8)
layers = [pp.Layer(nn.Linear, 8, 8), pp.Layer(compiled), pp.Layer(nn.Linear, 8, 8)]
print(pp.check(pp.Model(layers, nn.functional.mse_loss, sgd), [batch] * 2, stages=[1], microbatches=2))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.startswith("equal"), done.stdout


class Phase(nn.Module):
    """Keeps a complex number of which only the imaginary part is drawn where no seed reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.phase: Tensor
        self.register_buffer("phase", torch.zeros(1, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        self.phase = torch.tensor([1j * random.random()])
        return x


def test_a_difference_in_imaginary_parts_has_a_size() -> None:
    """It was 'by up to 0', after a warning that they are discarded."""
    report = pp.check(pp.Model([nn.Linear(D, D), Phase()], squared_error, sgd), BATCHES, stages=2)
    assert report.name == "1.phase"
    assert report.max_difference is not None and 0 < report.max_difference < 1
