"""Backwards in two parts: a stage's inputs first, its parameters later, to the same bits as in one.

Shapes: B samples, T tokens, D features.
"""

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lp_pipe.errors import PipelineError
from lp_pipe.pipeline.compute.split_backward import SplitBackward
from lp_pipe.pipeline.compute.stage import Stage
from lp_pipe.pipeline.layers.message import Message

B, T, D = 4, 19, 32


def test_the_inputs_gradient_comes_first_and_the_weights_later() -> None:
    linear = nn.Linear(2, 1, bias=False)
    stage = Stage(1, 1, [linear], seed=0)
    output = stage.forward(Message(torch.tensor([[3.0, 4.0]]), (True,)), step=0, microbatch=0)

    (gradient,) = stage.backward_from_loss(0, output.sum(), defer_weights=True)
    assert gradient is not None and torch.equal(gradient, linear.weight)
    assert linear.weight.grad is None

    stage.backward_weights(0)
    assert linear.weight.grad is not None and linear.weight.grad.tolist() == [[3.0, 4.0]]


# What a stage may be made of. Each takes [B, T, D].


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(D, 4, batch_first=True, dropout=0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x, x, x, need_weights=False)[0]


class CausalAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(D, 3 * D)
        self.out = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(2, (4, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LSTM(D, D, num_layers=2, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        return self.inner(x)[0]


class SharedThreeTimes(nn.Module):
    """The biases come before the weight that joins them, and other parameters lie between its uses."""

    def __init__(self) -> None:
        super().__init__()
        self.biases = nn.ParameterList([nn.Parameter(torch.randn(D)) for _ in range(3)])
        self.norm = nn.LayerNorm(D)
        self.weight = nn.Parameter(torch.randn(D, D) / D**0.5)

    def forward(self, x: Tensor) -> Tensor:
        for bias in self.biases:
            x = self.norm(torch.tanh(functional.linear(x, self.weight, bias)))
        return x


class MadeWeight(nn.Module):
    """The weight is computed from parameters, once, and used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.raw = nn.Parameter(torch.randn(D, D))
        self.scale = nn.Parameter(torch.rand(D, 1))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.scale * self.raw / self.raw.norm(dim=1, keepdim=True)
        return functional.linear(torch.tanh(functional.linear(x, weight)), weight)


class PositionalEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Embedding(T, D)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(torch.arange(T) % 7)


class AppliesHooks(nn.Module):
    """Changes gradients on their way, as clipping of activations' gradients does."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(D))

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.scale
        y.register_hook(lambda gradient: 3 * gradient)
        return y


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x**3 * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradients[0] * 3 * x**2 * weight, (gradients[0] * x**3).sum((0, 1))


class OwnFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(D))

    def forward(self, x: Tensor) -> Any:
        return Cube.apply(x, self.weight)  # type: ignore[no-untyped-call]


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D))

    def forward(self, x: Tensor) -> Any:
        return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)


class Apply(nn.Module):
    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Any) -> Any:
        return self.function(x)


class PastTheInput(nn.Module):
    """Returns the input's branch and one that only its own parameters lead to; a third mixes both."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Parameter(torch.randn(D))
        self.own = nn.Parameter(torch.randn(D))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        apart = (self.own * self.shared).exp()
        return x * self.shared, apart, x.sin() * apart, self.own


class Frozen(nn.Linear):
    def __init__(self) -> None:
        super().__init__(D, D)
        self.requires_grad_(False)


def _linear() -> nn.Module:
    return nn.Linear(D, D)


KINDS: dict[str, Callable[[], list[nn.Module]]] = {
    "linear": lambda: [_linear(), nn.GELU(), _linear()],
    "layer norm": lambda: [_linear(), nn.LayerNorm(D), _linear()],
    "rms norm": lambda: [nn.RMSNorm(D), _linear()],
    "batch norm": lambda: [nn.BatchNorm1d(T), _linear(), nn.BatchNorm1d(T)],
    "group norm": lambda: [nn.GroupNorm(1, T), _linear()],
    "group norm, channels last": lambda: [
        Apply(lambda x: x.unsqueeze(1)),
        nn.Conv2d(1, 8, 3),
        Apply(lambda x: x.contiguous(memory_format=torch.channels_last)),
        nn.GroupNorm(2, 8),
        nn.Conv2d(8, 8, 3),
    ],
    "frozen batch norm": lambda: [nn.BatchNorm1d(T).eval(), _linear()],
    "conv 1d": lambda: [nn.Conv1d(T, 8, 3, padding=1), nn.ReLU(), nn.Conv1d(8, T, 3, groups=1)],
    "conv 2d": lambda: [
        Apply(lambda x: x.unsqueeze(1)),
        nn.Conv2d(1, 8, 3),
        nn.BatchNorm2d(8),
        nn.Conv2d(8, 8, 3, groups=8),
    ],
    "conv 2d, channels last": lambda: [
        Apply(lambda x: x.unsqueeze(1)),
        nn.Conv2d(1, 8, 3),
        Apply(lambda x: x.contiguous(memory_format=torch.channels_last)),
        nn.Conv2d(8, 16, 3, stride=2),
    ],
    "transposed conv": lambda: [nn.ConvTranspose1d(T, 5, 3), nn.Conv1d(5, T, 1)],
    "attention": lambda: [Attention(), nn.LayerNorm(D), Attention()],
    "causal attention": lambda: [CausalAttention(), nn.LayerNorm(D), CausalAttention()],
    "transformer layer": lambda: [nn.TransformerEncoderLayer(D, 4, 64, dropout=0.1, batch_first=True)],
    "lstm": lambda: [Recurrent()],
    "embedding": lambda: [PositionalEmbedding(), _linear()],
    "prelu": lambda: [_linear(), nn.PReLU(), _linear()],
    "bilinear": lambda: [Apply(lambda x: (x, x.sin())), Apply(lambda xs: xs[0] @ xs[1].mT), nn.Linear(T, 5)],
    "dropout": lambda: [_linear(), nn.Dropout(0.3), _linear()],
    "in place": lambda: [nn.ReLU(inplace=True), _linear(), nn.ReLU(inplace=True), _linear(), nn.Hardtanh(inplace=True)],
    "view as output": lambda: [_linear(), Apply(lambda x: x.transpose(1, 2))],
    "slice as output": lambda: [_linear(), Apply(lambda x: x[:, 1:, ::2])],
    "views as outputs": lambda: [nn.Linear(D, 2 * D), Apply(lambda x: x.chunk(2, dim=-1))],
    "input as output": lambda: [Apply(lambda x: (x, x[..., :3]))],
    "same output twice": lambda: [_linear(), Apply(lambda x: (x, x))],
    "unused output": lambda: [_linear(), Apply(lambda x: (x, x.detach()))],
    "shared three times": lambda: [SharedThreeTimes()],
    "shared by layers": lambda: [shared := _linear(), nn.Tanh(), _linear(), shared, shared],
    "made weight": lambda: [_linear(), MadeWeight(), _linear()],
    "weight norm": lambda: [torch.nn.utils.parametrizations.weight_norm(nn.Linear(D, D)), _linear()],
    "spectral norm": lambda: [torch.nn.utils.parametrizations.spectral_norm(nn.Linear(D, D)), _linear()],
    "hooks": lambda: [AppliesHooks(), nn.Tanh(), AppliesHooks()],
    "own function": lambda: [_linear(), OwnFunction(), _linear()],
    "checkpointed": lambda: [Checkpointed(), Checkpointed()],
    "past the input": lambda: [PastTheInput()],
    "frozen": lambda: [Frozen(), nn.Tanh(), _linear(), Frozen()],
    "nothing to train": lambda: [nn.Tanh(), Apply(lambda x: x.exp())],
    "nothing at all": lambda: [nn.Identity()],
}


def _run(name: str, split: bool, wants_gradient: bool) -> dict[str, Any]:
    """Three micro-batches through a stage; the weights' parts wait until all inputs' parts are done."""
    torch.manual_seed(1)
    torch.set_num_threads(1)
    stage = Stage(1, 1, KINDS[name](), seed=0)
    inputs = []
    for microbatch in range(3):
        message = Message(torch.randn(B, T, D), (wants_gradient,))
        value = stage.forward(message, 0, microbatch)
        outputs = [o for o in dict.fromkeys(torch.utils._pytree.tree_leaves(value)) if o.requires_grad]
        gradients = [torch.randn(output.shape) for output in outputs]
        inputs.append(stage.backward(microbatch, gradients, defer_weights=split))
    if split:
        for microbatch in range(3):
            stage.backward_weights(microbatch)
    return {"inputs": inputs, "parameters": [(n, p.grad) for n, p in stage.named_parameters()]}


def assert_same(got: Any, want: Any) -> None:
    got_leaves, want_leaves = (torch.utils._pytree.tree_leaves(tree) for tree in (got, want))
    for ours, theirs in zip(got_leaves, want_leaves, strict=True):
        if isinstance(theirs, Tensor):
            assert torch.equal(ours, theirs)
            assert ours.stride() == theirs.stride()  # norms and optimizers sum in the order of memory
        else:
            assert ours == theirs


@pytest.mark.parametrize("wants_gradient", [True, False], ids=["inner stage", "first stage"])
@pytest.mark.parametrize("name", KINDS)
def test_both_parts_together_are_one_backward(name: str, wants_gradient: bool) -> None:
    assert_same(_run(name, True, wants_gradient), _run(name, False, wants_gradient))


def test_outputs_that_do_not_matter_give_no_gradient() -> None:
    layer = PastTheInput()
    stage = Stage(1, 1, [layer], seed=0)
    stage.forward(Message(torch.ones(D), (True,)), 0, 0)
    assert stage.backward(0, [None, None, None, None], defer_weights=True) == [None]
    stage.backward_weights(0)
    assert layer.own.grad is None

    stage.forward(Message(torch.ones(D), (True,)), 0, 0)
    assert stage.backward(0, [None, None, None, torch.ones(D)], defer_weights=True) == [None]
    stage.backward_weights(0)
    assert layer.own.grad is not None and layer.shared.grad is None


def test_a_loss_that_does_not_depend_on_the_input_still_trains() -> None:
    weight = torch.ones((), requires_grad=True)
    split = SplitBackward([(weight * 2, None)], torch.empty(0, requires_grad=True))
    split.accumulate()
    assert weight.grad == 2


def test_hooks_of_parameters_run_once_and_in_the_second_part() -> None:
    seen = []
    stage = Stage(1, 1, [linear := nn.Linear(D, D)], seed=0)
    linear.weight.register_hook(lambda _: seen.append("before"))
    linear.weight.register_post_accumulate_grad_hook(lambda _: seen.append("after"))
    output = stage.forward(Message(torch.ones(1, D), (True,)), 0, 0)
    stage.backward_from_loss(0, output.sum(), defer_weights=True)
    assert seen == []
    stage.backward_weights(0)
    assert seen == ["before", "after"]


class Costly(torch.autograd.Function):
    """Counts its backwards."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        Costly.calls += 1
        return gradients[0]


def test_the_second_part_does_not_repeat_the_first() -> None:
    costly = Apply(Costly.apply)
    stage = Stage(1, 1, [costly, _linear(), costly, _linear(), costly, nn.LayerNorm(D)], seed=0)
    output = stage.forward(Message(torch.ones(2, D), (True,)), 0, 0)
    Costly.calls = 0
    stage.backward_from_loss(0, output.sum(), defer_weights=True)
    assert Costly.calls == 3
    stage.backward_weights(0)
    assert Costly.calls == 3


class ScalesWhatItKept(torch.autograd.Function):
    """A second backward would find other values, and nothing in `freed`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, main_grad: Tensor) -> Tensor:
        ctx.kept = x.detach().clone(), weight.detach().clone()
        ctx.freed = [main_grad]
        return x * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.kept
        ctx.freed.pop().add_((gradients[0] * x).sum((0, 1)))
        x.mul_(0.5)
        return gradients[0] * weight, (gradients[0] * x).sum((0, 1)), None


class KeepsAMainGrad(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(D))
        self.register_buffer("main_grad", torch.zeros(D))

    def forward(self, x: Tensor) -> Any:
        return ScalesWhatItKept.apply(x, self.weight, self.main_grad)  # type: ignore[no-untyped-call]


class HalvesGradients(nn.Module):
    """A function that halves gradients in place, and counts; between uses of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(D, D)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(self.inner(x))
            x.register_hook(self._halve)
        return x

    def _halve(self, gradient: Tensor) -> None:
        self.count += 1
        gradient.mul_(0.5)


class FullHooks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(D, D)
        self.inner.register_full_backward_pre_hook(lambda _, gradients: tuple(g.mul_(0.5) for g in gradients))
        self.inner.register_full_backward_hook(lambda _, gradients, __: tuple(3 * g for g in gradients))

    def forward(self, x: Tensor) -> Any:
        return self.inner(x)


class Reversible(torch.autograd.Function):
    """Keeps its output only, computes its input from it, and gives weights their gradients by itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, f: nn.Module, g: nn.Module, *weights: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        y1 = a + f(b)
        y2 = b + g(y1)
        ctx.output, ctx.f, ctx.g, ctx.weights = torch.cat([y1, y2], -1).detach(), f, g, len(weights)
        return torch.cat([y1, y2], -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        y1, y2 = ctx.output.chunk(2, -1)
        del ctx.output
        d1, d2 = gradients[0].chunk(2, -1)
        y1 = y1.detach().requires_grad_()
        with torch.enable_grad():
            again = ctx.g(y1)
        again.backward(d2)
        d1 = d1 + y1.grad
        x2 = (y2 - again).detach().requires_grad_()
        with torch.enable_grad():
            again = ctx.f(x2)
        again.backward(d1)
        return torch.cat([d1, d2 + x2.grad], -1), None, None, *[None] * ctx.weights


class ReversibleBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.f, self.g = nn.Linear(D // 2, D // 2), nn.Linear(D // 2, D // 2)

    def forward(self, x: Tensor) -> Any:
        return Reversible.apply(x, self.f, self.g, *self.parameters())  # type: ignore[no-untyped-call]


class UsedInTwoWays(nn.Module):
    """A weight as it is and transformed, so often that the order in which gradients are added matters."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(D, D) / D**0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(x @ self.weight)
        for _ in range(2):
            x = torch.tanh(functional.linear(x, self.weight.exp())) @ self.weight
        return x


WITH_EFFECTS: dict[str, Callable[[], list[nn.Module]]] = {
    "a function that scales what it kept": lambda: [_linear(), KeepsAMainGrad(), _linear(), KeepsAMainGrad()],
    "hooks in place": lambda: [_linear(), HalvesGradients(), HalvesGradients()],
    "hooks of modules": lambda: [FullHooks(), nn.Tanh(), FullHooks()],
    "reversible": lambda: [ReversibleBlock(), _linear(), ReversibleBlock()],
    "a weight in two ways": lambda: [UsedInTwoWays(), _linear()],
    "a shared function": lambda: [shared := KeepsAMainGrad(), _linear(), shared, shared],
}


@pytest.mark.parametrize("name", WITH_EFFECTS)
def test_a_backward_with_effects_beside_its_results_has_them_once(name: str) -> None:
    found = []
    for is_split in (True, False):
        torch.manual_seed(1)
        stage = Stage(1, 1, WITH_EFFECTS[name](), seed=0)
        inputs = []
        for microbatch in range(3):  # each after the other, for the effects have the order of the backwards
            value = stage.forward(Message(torch.randn(B, T, D), (True,)), 0, microbatch)
            inputs.append(stage.backward(microbatch, [torch.randn(value.shape)], defer_weights=is_split))
            if is_split:
                stage.backward_weights(microbatch)
        state = [(name, p.grad) for name, p in stage.named_parameters()]
        found.append((inputs, state, [b for layer in stage.layers for b in layer.buffers()]))
    assert_same(*found)


class HalvesBefore(nn.Module):
    """A layer whose hook writes to the gradient that the bias behind it gets, too."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(D))

    def forward(self, x: Tensor) -> Tensor:
        y = x * 1
        y.register_hook(lambda gradient: gradient.mul_(0.5))
        return y + self.bias


class ChangesWhatOthersSaved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1
        y = x * 1
        y.register_hook(lambda _: x.detach().mul_(0.5))
        return y + self.inner(x)


@pytest.mark.parametrize("layer", [HalvesBefore, ChangesWhatOthersSaved])
def test_a_backward_that_changes_what_the_second_part_needs_is_refused(layer: type[nn.Module]) -> None:
    stage = Stage(1, 1, [layer()], seed=0)
    value = stage.forward(Message(torch.ones(2, D), (True,)), 0, 0)
    stage.backward(0, [torch.ones(2, D)], defer_weights=True)
    with pytest.raises((PipelineError, RuntimeError)) as raised:
        stage.backward_weights(0)
    assert "1f1b" in "".join([str(raised.value), *getattr(raised.value, "__notes__", [])])
    del value


@pytest.mark.filterwarnings("ignore:Using a non-full backward hook")
def test_a_hook_that_torch_keeps_at_a_node_is_refused() -> None:
    linear = nn.Linear(D, D)
    linear.register_backward_hook(lambda *_: None)
    stage = Stage(1, 1, [nn.Sequential(linear)], seed=0)
    stage.forward(Message(torch.ones(2, D), (True,)), 0, 0)
    with pytest.raises(PipelineError, match=r"layer 1 \(0\), Linear"):
        stage.backward(0, [torch.ones(2, D)], defer_weights=True)


@contextmanager
def _without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.parametrize("name", ["linear", "attention", "shared three times", "hooks", "views as outputs"])
def test_activations_go_with_the_second_part(name: str) -> None:
    """Memory is freed at once: a training loop allocates faster than Python's collector runs."""
    activations: list[weakref.ref[Tensor]] = []

    def keep(x: Tensor) -> Tensor:
        activations.append(weakref.ref(product := x * 2))
        return product * product  # saves both

    stage = Stage(1, 1, [Apply(keep), *KINDS[name]()], seed=0)
    with _without_collector():
        for microbatch in range(2):
            value = stage.forward(Message(torch.randn(B, T, D), (True,)), 0, microbatch)
            outputs = torch.utils._pytree.tree_leaves(value)
            stage.backward(microbatch, [torch.ones_like(output) for output in outputs], defer_weights=True)
            del value, outputs
        assert [activation() is None for activation in activations] == [False, False]
        stage.backward_weights(0)
        assert [activation() is None for activation in activations] == [True, False]
        stage.discard()
        assert activations[1]() is None
