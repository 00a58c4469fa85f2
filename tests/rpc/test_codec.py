"""Every kind of value that users send, there and back."""

import dataclasses
import enum
import functools
import json
import sys
import types
import typing
from collections import OrderedDict, defaultdict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lp_pipe.rpc import codec


def through(value: Any) -> Any:
    """Return what the peer gets, with buffers in the memory that a carrier makes of them."""
    body, buffers = codec.encode(value)
    return codec.decode(bytes(body), [bytearray(buffer) for buffer in buffers])


def size_of(value: Any) -> int:
    body, buffers = codec.encode(value)
    return len(body) + sum(memoryview(buffer).nbytes for buffer in buffers)


class Point(typing.NamedTuple):
    x: int
    y: int


@dataclasses.dataclass
class Config:
    name: str
    layers: list[int] = dataclasses.field(default_factory=list)


class Colour(enum.Enum):
    RED = "red"


class Flags(enum.Flag):
    A = 1
    B = 2


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value: int) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Slotted) and other.value == self.value

    __hash__ = None  # type: ignore[assignment]


def function(x: int) -> int:
    return x + 1


VALUES = [
    (1, [2, (3,)], {"a": None}),
    b"bytes",
    bytearray(b"bytearray"),
    "text with ümlaut, \x00 and 🙂",
    2**200,
    -(2**63),
    float("inf"),
    -0.0,
    3 + 4j,
    {1, "two"},
    frozenset({3}),
    Point(1, 2),
    Config("c", [1]),
    Colour.RED,
    Flags.A | Flags.B,
    OrderedDict(b=1, a=2),
    defaultdict(list, a=[1]),
    deque([1, 2], maxlen=3),
    Slotted(3),
    range(3),
    slice(1, 2),
    Path("/a/b"),
    ...,
    NotImplemented,
    type(None),
    int,
    Point,
    Config,
    function,
    len,
    sys.exit,
    types.SimpleNamespace(a=1),
]


def test_a_value_comes_back_equal_and_of_the_same_type() -> None:
    value = {"tuple": (1, 2), "list": [b"x"], "point": Point(1, 2)}
    back = through(value)
    assert back == value
    assert type(back["point"]) is Point


@pytest.mark.parametrize("value", VALUES)
def test_python_types_are_kept(value: Any) -> None:
    back = through(value)
    assert type(back) is type(value)
    assert back == value


def test_nan_stays_nan() -> None:
    back = through(float("nan"))
    assert back != back


def test_lambdas_local_classes_and_closures_travel_by_value() -> None:
    factor = 3

    class Local:
        def scale(self, x: int) -> int:
            return x * factor

    assert through(lambda x: x * factor)(2) == 6
    assert through(Local)().scale(2) == 6
    assert through(Local()).scale(3) == 9
    assert through([Local(), np.zeros(3), lambda: 1])[0].scale(1) == 3


def test_shared_and_cyclic_references_stay_shared_and_cyclic() -> None:
    item = [1]
    cyclic: list[Any] = [item, item]
    cyclic.append(cyclic)
    back = through(cyclic)
    assert back[0] is back[1]
    assert back[2] is back


# numpy

ARRAYS = [
    *(np.arange(6, dtype=kind).reshape(2, 3) for kind in "bBhHiIlLqQefdgFDG"),
    np.array([True, False]),
    np.array(3.5),
    np.array([], dtype=np.float32).reshape(0, 3),
    np.array(["a", "bcd"]),
    np.array([b"a", b"bcd"]),
    np.array([1, "two", None, [3]], dtype=object),
    np.array([(1, 2.0), (3, 4.0)], dtype=[("a", "i4"), ("b", "f8")]),
    np.array([(1, [1, 2])], dtype=[("a", "i4"), ("b", object)]),
    np.array(["2020-01-01", "NaT"], dtype="datetime64[D]"),
    np.array([1, 2], dtype="timedelta64[ms]"),
    np.arange(12).reshape(3, 4)[:, ::2],
    np.arange(12).reshape(3, 4).T,
    np.arange(12)[::-1],
    np.asfortranarray(np.arange(6).reshape(2, 3)),
    np.broadcast_to(np.arange(3), (4, 3)),
    np.arange(4, dtype=">i4"),
    np.ma.masked_array([1, 2, 3], [0, 1, 0]),
    np.zeros((100, 100)),
    np.zeros((100, 100)).astype("datetime64[s]"),
]


@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: f"{array.dtype}{array.shape}")
def test_numpy_arrays_of_every_kind(array: Any) -> None:
    back = through([array])[0]
    assert type(back) is type(array)
    assert (back.dtype, back.shape) == (array.dtype, array.shape)
    np.testing.assert_array_equal(back, array)


def test_numpy_scalars_keep_their_type() -> None:
    for scalar in (np.float32(1.5), np.int8(3), np.bool_(True), np.str_("x"), np.datetime64("2020-01-01")):
        assert type(through(scalar)) is type(scalar)
        assert through(scalar) == scalar


@pytest.mark.parametrize("size", [3, 10_000])
def test_received_arrays_can_be_written_to(size: int) -> None:
    back = through(np.zeros(size))
    back += 1
    assert back.sum() == size


def test_large_memory_is_not_copied_into_the_pickle() -> None:
    body, buffers = codec.encode({"a": np.zeros(100_000), "b": np.zeros(3)})
    assert len(body) < 2000
    assert [memoryview(buffer).nbytes for buffer in buffers] == [800_000]


def test_a_small_view_does_not_ship_the_array_that_it_belongs_to() -> None:
    assert size_of(np.zeros(1_000_000)[:3]) < 2000
    assert size_of(np.zeros((1000, 1000))[:, 0]) < 10_000


# dumps and loads: for files, and for values inside other messages


def test_dumps_is_one_piece_of_bytes() -> None:
    value = {"array": np.arange(1000), "lambda": lambda: 5}
    back = codec.loads(codec.dumps(value))
    assert np.array_equal(back["array"], value["array"])  # type: ignore[arg-type]
    assert back["lambda"]() == 5
    back["array"][0] = 3


def test_what_cannot_be_imported_elsewhere_goes_by_value() -> None:
    # A module that was made by hand, or loaded from a file by its path: pickle would only name it.
    module = types.ModuleType("made_by_hand")
    exec("value = 2\nclass Thing:\n    def get(self):\n        return value\n", module.__dict__)
    sys.modules["made_by_hand"] = module
    try:
        body, buffers = codec.encode(module.Thing())
    finally:
        del sys.modules["made_by_hand"]
    assert codec.decode(body, buffers).get() == 2


def test_function_that_bears_the_name_of_a_builtin_goes_by_value() -> None:
    @functools.wraps(len)
    def counted(value: Any) -> int:
        return len(value) + 1

    assert through(counted)("ab") == 3


def test_finders_of_the_old_kind_are_skipped_as_by_import(monkeypatch: pytest.MonkeyPatch) -> None:
    class OldFinder:
        def find_module(self, name: str, path: Any = None) -> None: ...

    monkeypatch.setattr(sys, "meta_path", [OldFinder(), *sys.meta_path])
    codec._is_importable.cache_clear()
    assert through(lambda: json.dumps([1]))() == "[1]"


def test_tensors_of_the_cpu_stay_there_where_torch_has_another_default_device() -> None:
    torch = pytest.importorskip("torch")
    numbers = torch.arange(12.0).reshape(3, 4)
    for tensor in (numbers, numbers.t(), numbers[:, ::2], numbers[:0], torch.zeros(()), numbers.expand(2, 3, 4)):
        payload = codec.encode(tensor)
        with torch.device("meta"):
            found = codec.decode(payload.body, [bytearray(buffer) for buffer in payload.buffers])
        assert found.device.type == "cpu" and found.stride() == tensor.stride()
        assert torch.equal(found, tensor)
