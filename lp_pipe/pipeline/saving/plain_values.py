"""Entries of a checkpoint that are no tensors: written only if they can be read back, and read without acting.

torch.load(weights_only=True) knows Python's own types and tensors. Learning rates are numpy's numbers as soon as a
schedule computes with numpy (`LambdaLR(optimizer, lambda step: numpy.cos(step))`), so these are read, too.
"""

import io
import threading
from collections import Counter, OrderedDict
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import nn

from lp_pipe.errors import PipelineError
from lp_pipe.pipeline.saving.saved import Key

_OF_PYTHON = (type(None), bool, int, float, complex, str, bytes)
_LEAVES = frozenset((*_OF_PYTHON, torch.Tensor, nn.Parameter, torch.Size, torch.dtype, torch.device))
_MAPPINGS = frozenset((dict, OrderedDict, Counter))
_SEQUENCES = frozenset((list, tuple, set))
_NUMPY: tuple[Any, ...] = (
    np.float64().__reduce__()[0],  # how numpy pickles its numbers
    np.empty(0).__reduce__()[0],  # and arrays
    np.ndarray,
    np.dtype,
    *{type(np.dtype(code)) for code in np.typecodes["AllInteger"] + np.typecodes["AllFloat"] + "?SU"},
)
_reading = threading.Lock()  # what is safe is safe in the whole process, where stages may be threads


def dumped(key: Key, value: Any) -> bytes:
    """What torch.save writes of an entry.

    Raises:
        PipelineError: it could not be read back; says what it is.
    """
    foreign = _first_foreign(value, "", set())
    if foreign is None:
        return _saved(value)
    try:
        saved = _saved(value)
        loaded(io.BytesIO(saved))
    except Exception as error:  # objects may raise anything
        where, what = foreign
        raise PipelineError(
            f"{'.'.join(key)}{where} is a {type(what).__name__}, which cannot be read back from a checkpoint: keep "
            "numbers, strings, tensors, and lists and dicts of these, or let state_dict() and load_state_dict() make "
            "them of it"
        ) from error
    return saved


def loaded(file: BinaryIO) -> Any:
    """Undo `dumped`.

    Raises:
        Exception: it holds something else than data, or is damaged.
    """
    with _reading:
        known = set(torch.serialization.get_safe_globals())
        with torch.serialization.safe_globals([one for one in _NUMPY if one not in known]):
            return torch.load(file, weights_only=True, map_location="cpu")


def _saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def _first_foreign(value: Any, where: str, seen: set[int]) -> tuple[str, Any] | None:
    """What is none of the types that are known to be read back, and where it is in the entry."""
    kind = type(value)
    if kind in _LEAVES or id(value) in seen:
        return None
    if kind not in _MAPPINGS and kind not in _SEQUENCES:
        return where, value
    seen.add(id(value))
    pairs = [*value.items(), *zip(value, value, strict=True)] if kind in _MAPPINGS else enumerate(value)
    found = (_first_foreign(part, f"{where}[{key!r}]", seen) for key, part in pairs if type(part) not in _LEAVES)
    return next((one for one in found if one is not None), None)
