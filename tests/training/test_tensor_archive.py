"""Small tensors are written as torch.save writes them, without calling it for each."""

import io
import zipfile
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lp_pipe.training import tensor_archive

SERIALIZATION_ID = "archive/.data/serialization_id"
DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.bool, torch.complex64, torch.complex128),
]
SHAPES = [(), (1,), (0,), (0, 3), (7,), (1, 1), (2, 3, 4), (300, 5)]
VIEWS: dict[str, Any] = {
    "transposed": lambda: torch.randn(3, 4).T,
    "channels_last": lambda: torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "slice of more": lambda: torch.randn(100)[3:7],
    "expanded": lambda: torch.randn(1, 3).expand(4, 3),
    "one element of odd stride": lambda: torch.randn(10, 10).as_strided((1, 1), (7, 3), 5),
    "conjugate": lambda: torch.randn(3, dtype=torch.complex64).conj(),
    "negative": lambda: torch.randn(3, dtype=torch.complex64).conj().imag,
    "parameter": lambda: nn.Parameter(torch.randn(2, 2)),
    "large": lambda: torch.arange(tensor_archive._SMALL_BYTES // 8 + 1),
    "slice of a large one": lambda: torch.arange(tensor_archive._SMALL_BYTES)[: tensor_archive._SMALL_BYTES // 4],
}


@pytest.fixture
def told_to_write_no_checksums() -> Iterator[None]:
    tensor_archive._archive.cache_clear()
    torch.serialization.set_crc32_options(False)
    yield
    torch.serialization.set_crc32_options(True)
    tensor_archive._archive.cache_clear()


def written(save: Any, tensor: Tensor) -> bytes:
    file = io.BytesIO()
    save(tensor, file)
    return file.getvalue()


def without_id(archive: bytes) -> bytes:
    """Return the archive without its own checksum and the hash of the others."""
    with zipfile.ZipFile(io.BytesIO(archive)) as found:
        checksum = found.getinfo(SERIALIZATION_ID).CRC.to_bytes(4, "little")
        return archive.replace(found.read(SERIALIZATION_ID), b"").replace(checksum, b"")


def check(tensor: Tensor) -> None:
    dense = tensor.detach().clone(memory_format=torch.contiguous_format).resolve_conj().resolve_neg()
    found = written(tensor_archive.save, tensor)
    assert without_id(found) == without_id(written(torch.save, dense))
    with zipfile.ZipFile(io.BytesIO(found)) as archive:
        assert archive.testzip() is None
    read = torch.load(io.BytesIO(found), weights_only=True)
    assert read.dtype == tensor.dtype and read.shape == tensor.shape
    assert tensor_archive.elements_of(read) == tensor_archive.elements_of(dense)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_shape_has_the_bytes_of_torch_save(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    for seed in range(3):  # the first one makes what the others are made from
        torch.manual_seed(seed)
        check((100 * torch.randn(shape)).abs().to(dtype))


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_is_written_as_its_dense_copy(view: str) -> None:
    for seed in range(2):
        torch.manual_seed(seed)
        check(VIEWS[view]())


def test_large_tensors_leave_nothing_behind() -> None:
    before = tensor_archive._archive.cache_info()
    check(torch.zeros(tensor_archive._SMALL_BYTES + 1, dtype=torch.uint8))
    assert tensor_archive._archive.cache_info() == before


@pytest.mark.usefixtures("told_to_write_no_checksums")
def test_torch_writes_each_one_when_it_is_told_to_write_otherwise() -> None:
    tensor = torch.randn(5)
    found = written(tensor_archive.save, tensor)
    assert found == written(torch.save, tensor)
    assert torch.equal(torch.load(io.BytesIO(found), weights_only=True), tensor)


def test_torch_is_asked_once_for_each_dtype_and_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(torch, "save", lambda *args, save=torch.save: (asked.append(args[0].shape), save(*args)))
    tensor_archive._archive.cache_clear()
    for tensor in [torch.randn(5), torch.randn(5), torch.randn(5, 1), torch.zeros(5), torch.zeros(5).bfloat16()]:
        written(tensor_archive.save, tensor)
    assert asked == [(5,), (5, 1), (5,)]
