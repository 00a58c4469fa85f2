"""Forms of a gradient that need fewer bytes on the wire. What a form leaves out is added to the next gradient."""

import json
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor


class Compression(ABC):
    """A compressed form of flat tensors of floating-point numbers. Picklable."""

    @abstractmethod
    def encode(self, flat: Tensor) -> list[Tensor]:
        """Return the compressed form as flat tensors."""

    @abstractmethod
    def decode(self, form: Sequence[Tensor], numel: int) -> Tensor:
        """Return a tensor of `numel` elements, which is close to the one that was encoded."""

    @abstractmethod
    def dtypes(self, dtype: torch.dtype) -> list[torch.dtype]:
        """Return the dtypes of the form's tensors for a tensor of this dtype."""

    def to_text(self) -> str:
        return json.dumps([type(self).__name__, asdict(self)])  # type: ignore[call-overload]  # all are dataclasses

    @staticmethod
    def of_text(text: str) -> "Compression":
        name, options = json.loads(text)
        return _KINDS[name](**options)


@dataclass(frozen=True)
class TopK(Compression):
    """Compression to the given share of the elements, those of the largest magnitude.

    Source: Lin et al., "Deep Gradient Compression" (ICLR 2018), with the error feedback of Karimireddy et al. (2019).
    """

    ratio: float

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1:
            raise ValueError(f"TopK(ratio) must be above 0 and at most 1, got {self.ratio!r}")

    def encode(self, flat: Tensor) -> list[Tensor]:
        kept = max(1, int(len(flat) * self.ratio)) if len(flat) else 0
        indices = flat.abs().topk(kept, sorted=False).indices
        return [indices.to(torch.int32), flat[indices]]

    def decode(self, form: Sequence[Tensor], numel: int) -> Tensor:
        indices, values = form
        return torch.zeros(numel, dtype=values.dtype).index_copy_(0, indices.long(), values)

    def dtypes(self, dtype: torch.dtype) -> list[torch.dtype]:
        return [torch.int32, dtype]


@dataclass(frozen=True)
class OneBit(Compression):
    """Compression to the signs of the elements, and the mean magnitude of the positive and of the negative ones.

    Source: Seide et al., "1-Bit Stochastic Gradient Descent" (Interspeech 2014).
    """

    def encode(self, flat: Tensor) -> list[Tensor]:
        is_positive = flat > 0
        padded = torch.zeros(-(-len(flat) // 8) * 8, dtype=torch.uint8)
        padded[: len(flat)] = is_positive
        bits = (padded.view(-1, 8) << torch.arange(8, dtype=torch.uint8)).sum(1, dtype=torch.uint8)
        count = int(is_positive.sum())
        total = flat.sum()
        positive = torch.where(is_positive, flat, 0).sum()
        return [bits, torch.stack([positive / max(1, count), (total - positive) / max(1, len(flat) - count)])]

    def decode(self, form: Sequence[Tensor], numel: int) -> Tensor:
        bits, means = form
        is_positive = (bits.unsqueeze(1) >> torch.arange(8, dtype=torch.uint8)).bitwise_and_(1).view(-1)[:numel]
        return torch.where(is_positive.bool(), means[0], means[1])

    def dtypes(self, dtype: torch.dtype) -> list[torch.dtype]:
        return [torch.uint8, dtype]


@dataclass(frozen=True)
class Fp16(Compression):
    """Compression to half precision; larger numbers become the largest one of it."""

    def encode(self, flat: Tensor) -> list[Tensor]:
        largest = torch.finfo(torch.float16).max
        return [flat.clamp(-largest, largest).to(torch.float16)]

    def decode(self, form: Sequence[Tensor], numel: int) -> Tensor:
        return form[0].float()

    def dtypes(self, dtype: torch.dtype) -> list[torch.dtype]:
        return [torch.float16]


_KINDS: dict[str, type[Compression]] = {kind.__name__: kind for kind in (TopK, OneBit, Fp16)}


class ErrorFeedback:
    """A compression with what it has left out of each tensor so far, which is added to the tensor of the next time."""

    def __init__(self, compression: Compression) -> None:
        self.compression = compression
        self._left_out: dict[Hashable, Tensor] = {}

    def encode(self, key: Hashable, flat: Tensor) -> list[Tensor]:
        """Return the compressed form of the tensor with this key, which is changed."""
        left_out = self._left_out.get(key)
        if left_out is not None and left_out.shape == flat.shape:
            flat.add_(left_out)
        form = self.compression.encode(flat)
        rest = flat - self.compression.decode(form, len(flat)).to(flat.dtype)
        self._left_out[key] = torch.where(rest.isfinite(), rest, 0)  # a gradient of inf must not stay for ever
        return form
