"""Requests of a split module to torch.export, and how its refusals are shown."""

import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lp_pipe.pipeline as pp


def test_sizes_that_torch_cannot_solve_for_are_those_of_the_example() -> None:
    # AlexNet and others with strides and pools behind each other: torch.export has sympy work out for which image sizes
    # its graph holds, sympy said that it "cannot be solved", and the module could not be split at all.
    layers = [nn.Conv2d(3, 4, 3, 2, 1), nn.MaxPool2d(3, 2), nn.MaxPool2d(3, 2), nn.Flatten(), nn.Linear(4, 2)]
    module = nn.Sequential(*layers).eval()
    pieces = pp.Sequential(pp.split(module, torch.randn(2, 3, 16, 16), ["1", "3"])).eval()
    for samples in (1, 2, 5):
        images = torch.randn(samples, 3, 16, 16)
        assert torch.equal(pieces(images), module(images))
    with pytest.raises(pp.PipelineError, match=r"split for inputs of shape .*16, 16\], not \[2, 3, 17, 16\]"):
        pieces(torch.randn(2, 3, 17, 16))


class Options(nn.Module):
    """Takes a mask by name, and options that only some callers have."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
        y = torch.tanh(self.first(x))
        if mask is not None:
            y = y * mask
        if "offset" in options:
            y = y + options["offset"]
        return self.last(y * 2) if options.get("is_doubled") else self.last(y)  # type: ignore[no-any-return]


class Wrapper(nn.Module):
    """A module that passes on any arguments, as PeftModel does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Options()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


@pytest.mark.parametrize(
    ("kind", "point", "keywords"),
    [
        (Options, "last", ["offset"]),
        (Options, "last", ["mask", "is_doubled"]),
        (Wrapper, "inner.last", ["mask"]),
        (Wrapper, "inner.last", ["is_doubled", "offset", "mask"]),
    ],
)
def test_keywords_that_forward_takes_by_kwargs(kind: type[nn.Module], point: str, keywords: list[str]) -> None:
    def batch(samples: int) -> dict[str, Any]:
        values = {"mask": torch.ones(samples, 4), "is_doubled": True, "offset": torch.randn(samples, 4)}
        return {"x": torch.randn(samples, 4), **{name: values[name] for name in keywords}}

    module = kind()
    pieces = pp.split(module, batch(3), [point])
    assert "forward" not in vars(module)
    assert [name for piece in pieces for name in piece.state_dict()] == list(module.state_dict())
    for samples in (1, 5):
        given = batch(samples)
        assert torch.equal(pp.Sequential(pieces)(given), module(**given))
    with pytest.raises(pp.PipelineError, match="split for inputs such as"):
        pieces[0]({"x": torch.randn(3, 4)})


class HasNoSuchLayer(Options):
    def forward(self, x: Tensor, mask: Tensor | None = None, **options: Any) -> Any:
        return self.middle(x)


class Branches(Options):
    def forward(self, x: Tensor, mask: Tensor | None = None, **options: Any) -> Any:
        y = self.first(x)
        return self.last(y if y.sum() > 0 else -y)


def test_an_error_of_forward_is_shown_without_guesses_at_its_reason() -> None:
    with pytest.raises(pp.PipelineError) as raised:
        pp.split(HasNoSuchLayer(), torch.randn(3, 4), ["last"])
    assert "no attribute 'middle' (at test_tracing.py" in str(raised.value)
    assert str(raised.value).endswith("return self.middle(x))")


def test_a_refused_module_leaves_the_terminal_clean(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(pp.PipelineError, match=r"branches .*depend on values"):
        pp.split(Branches(), torch.randn(3, 4), ["last"])
    assert capfd.readouterr() == ("", "")


class Talks(Options):
    def forward(self, x: Tensor, mask: Tensor | None = None, **options: Any) -> Any:
        print("called", file=sys.stderr)
        return super().forward(x, mask, **options)


def test_what_forward_itself_prints_is_kept(capfd: pytest.CaptureFixture[str]) -> None:
    pp.split(Talks(), torch.randn(3, 4), ["last"])
    assert set(capfd.readouterr().err.split()) == {"called"}
