"""Large tensors that stay have pages of their own, which go back to the system when they are freed."""

import ctypes
import platform

import pytest
import torch

from lp_pipe.training import lasting_memory
from lp_pipe.training.lasting_memory import lasting, lasting_empty

NUMEL = 1 << 20


class _Heap(ctypes.Structure):
    """The result of glibc's mallinfo2."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "top",
        )
    )


def in_own_pages() -> int:
    """Return the bytes of malloc's blocks that are outside of its heap."""
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = _Heap
    return int(mallinfo().hblkhd)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the settings are glibc's")
def test_tensors_that_are_made_in_the_body_go_back_to_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = {lasting_memory._TOP_PAD: 1 << 26, lasting_memory._MMAP_THRESHOLD: 1 << 25}
    monkeypatch.setattr(lasting_memory, "_settings", lambda: usual)
    before = in_own_pages()
    with lasting(), lasting():
        state = torch.empty(1 << 27)  # larger than any hole that other tests have left in the heap
    during = in_own_pages()
    assert during - before >= state.nbytes
    gradient = torch.empty(NUMEL)
    assert gradient.nbytes > lasting_memory._LARGE_BYTES and in_own_pages() == during, "others are in the heap again"
    del state
    assert in_own_pages() == before


def test_nothing_changes_where_the_heap_is_the_users() -> None:
    assert lasting_memory._settings() == {}  # of pytest's own process
    with lasting():
        pass


@pytest.mark.parametrize("numel", [0, 3, NUMEL])
def test_memory_for_tensors_of_any_size(numel: int) -> None:
    made = lasting_empty(numel, torch.float64, torch.device("cpu"))
    assert (made.shape, made.dtype) == ((numel,), torch.float64)
    made.fill_(2)
    assert made.sum() == 2 * numel
