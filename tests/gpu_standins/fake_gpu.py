"""torch.cuda as far as lp_pipe's channels need it, on the host, for one process: `install` replaces it for good.

Streams and events are those of fake_nccl.c. A "GPU's tensor" is a float64 tensor of the host. Copies into messages are
queued on the current stream, like a kernel. For CUDA IPC memory is a file in a folder that both processes know, an
interprocess event is two counters in a file, and so is the count of the uses of a memory that is shared.
"""

import ctypes
import itertools
import os
import threading
import time
import types
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from lp_pipe.channels import async_receive, cuda_ipc, gpu, libnccl, packing, rank_transport

_kept: list[Any] = []  # what queued operations use: there is no allocator here that waits for a stream
_numbers = itertools.count()
_local = threading.local()
_counters: dict[int, Tensor] = {}  # by the address of a memory that was shared
_files: dict[int, str] = {}  # by the memory's address
lib: Any = None
folder = ""


class Stream:
    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.cuda_stream = lib.fake_stream()

    def wait_stream(self, other: "Stream") -> None:
        if other is not self:
            lib.fake_wait(self.cuda_stream, other.cuda_stream, lib.fake_record(other.cuda_stream))

    def query(self) -> bool:
        return bool(lib.fake_is_done(self.cuda_stream, lib.fake_record(self.cuda_stream)))


class Event:
    """An event of this process, or one that `path` shares: [how often it was recorded, how often it has come]."""

    def __init__(self, interprocess: bool = False, path: str = "") -> None:
        self._at: tuple[int, int] | None = None
        self._path = path or (f"{folder}/event-{os.getpid()}-{next(_numbers)}" if interprocess else "")
        self._shared = torch.from_file(self._path, True, 2, dtype=torch.int64) if self._path else None

    def record(self, stream: Stream | None = None) -> None:
        handle = (stream or current_stream()).cuda_stream
        if self._shared is not None:
            self._shared[0] += 1
            count = self._shared[:1].clone()
            _kept.append((self._shared, count))
            lib.fake_copy(handle, self._shared.data_ptr() + 8, count.data_ptr(), 8)
        self._at = handle, lib.fake_record(handle)

    def query(self) -> bool:
        if self._shared is not None:
            return int(self._shared[1]) >= int(self._shared[0])
        return self._at is None or bool(lib.fake_is_done(*self._at))

    def ipc_handle(self) -> bytes:
        return self._path.encode()

    @classmethod
    def from_ipc_handle(cls, device: torch.device, handle: bytes) -> "Event":
        return cls(path=handle.decode())


def current_stream(device: Any = None) -> Any:
    return getattr(_local, "stream", None) or default_stream


@contextmanager
def use_stream(stream: Any) -> Iterator[None]:
    before, _local.stream = getattr(_local, "stream", None), stream
    try:
        yield
    finally:
        _local.stream = before


class _LazyTarget:
    """A part of a message's memory, which is written by an operation on the current stream."""

    def __init__(self, target: Tensor) -> None:
        self._target = target

    def copy_(self, source: Tensor, non_blocking: bool = False) -> None:
        source = source.contiguous()
        _kept.append((self._target, source))
        lib.fake_copy(current_stream().cuda_stream, self._target.data_ptr(), source.data_ptr(), source.nbytes)


def _on_host(tensor: Tensor) -> Tensor:
    """Copy once the stream has done what was queued before, like torch's."""
    while not current_stream().query():
        time.sleep(1e-4)
    return tensor.clone()


def compute(seconds: float, tensor: Tensor | None = None, value: int = 0) -> None:
    """Keep the stage's stream busy for some time, and then fill the tensor."""
    lib.fake_sleep(default_stream.cuda_stream, int(seconds * 1e6))
    if tensor is not None:
        _kept.append(tensor)
        lib.fake_fill(default_stream.cuda_stream, tensor.data_ptr(), tensor.nbytes, value)


def uses_of_shared_memory() -> int:
    """Return how many uses of this process's memory were not given back."""
    return sum(max(0, int(counter)) for counter in _counters.values())


def install(gpu_name: str, library: str, ipc_folder: str) -> None:
    """Replace torch.cuda in this process, which then has one GPU of this name."""
    global lib, folder, default_stream  # this process's only GPU
    lib, folder = ctypes.CDLL(library), ipc_folder
    handle, number = ctypes.c_void_p, ctypes.c_uint64
    lib.fake_stream.restype = handle
    lib.fake_record.argtypes, lib.fake_record.restype = [handle], number
    lib.fake_is_done.argtypes = [handle, number]
    lib.fake_wait.argtypes = [handle, handle, number]
    lib.fake_sleep.argtypes = [handle, number]
    lib.fake_copy.argtypes = [handle, handle, handle, number]
    lib.fake_fill.argtypes = [handle, handle, number, ctypes.c_int]
    os.environ["FAKE_GPU"] = gpu_name
    libnccl.LIBRARY = library
    default_stream = Stream()
    replaced: dict[str, Any] = {
        "Stream": Stream,
        "Event": Event,
        "stream": use_stream,
        "current_stream": current_stream,
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "device": lambda device: nullcontext(),
        "get_device_properties": lambda device: types.SimpleNamespace(uuid=gpu_name),
        "can_device_access_peer": lambda one, other: True,
        "ipc_collect": lambda: None,
    }
    for name, value in replaced.items():
        setattr(torch.cuda, name, value)
    tensors: Any = torch.Tensor
    to = torch.Tensor.to
    tensors.record_stream = lambda self, stream: None
    tensors.cpu = _on_host
    tensors.to = lambda self, where, *rest: self if where == torch.device("cuda:0") else to(self, where, *rest)
    packing.is_on_gpu = lambda tensor: tensor.dtype == torch.float64
    _replace_memory()
    _replace_ipc()


def _replace_memory() -> None:
    empty_tensor, tensor_over = packing.empty_tensor, packing.tensor_over
    async_receive.empty_tensor = lambda spec, device=None: empty_tensor(spec)

    def memory_on(device: torch.device, size: int) -> Tensor:
        if not size:
            return torch.empty(0, dtype=torch.uint8)
        if size > int(os.environ.get("FAKE_FREE_BYTES", size)):
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size} bytes")
        path = f"{folder}/memory-{os.getpid()}-{next(_numbers)}"
        memory = torch.from_file(path, True, size, dtype=torch.uint8)
        _files[memory.data_ptr()] = path
        return memory

    def lazily(memory: Tensor, offset: int, spec: packing.TensorSpec) -> Any:
        target = tensor_over(memory, offset, spec)
        return _LazyTarget(target) if spec.is_on_gpu else target

    gpu.memory_on = memory_on
    rank_transport.tensor_over = cuda_ipc.tensor_over = lazily


def _replace_ipc() -> None:
    def reduce_tensor(memory: Tensor) -> Any:
        address = memory.data_ptr()
        path = _files[address]
        counter = torch.from_file(f"{path}-uses", True, 1, dtype=torch.int64)
        counter[0] = 1
        _counters[address] = counter
        storage = torch.storage.TypedStorage
        handle, size = path.encode(), memory.numel()
        uses = f"{path}-uses".encode()
        shape = memory.size(), memory.stride(), 0
        return None, (type(memory), *shape, storage, memory.dtype, 0, handle, size, 0, False, uses, 0, b"event", True)

    def rebuild(*arguments: Any) -> Tensor:
        assert len(arguments) == 15 and arguments[6] == 0 and arguments[14] is False, arguments
        if os.environ.get("FAKE_IPC") == "refused":
            raise RuntimeError("CUDA error: invalid device context")
        path = arguments[7].decode()
        if os.environ.get("FAKE_IPC") == "garbage":
            return torch.zeros(arguments[8], dtype=torch.uint8)
        memory = torch.from_file(path, True, arguments[8], dtype=torch.uint8)
        weakref.finalize(memory, release, arguments[11], arguments[12])
        return memory

    def release(handle: bytes, offset: int, **device: Any) -> None:
        torch.from_file(handle.decode(), True, 1, dtype=torch.int64)[offset] -= 1

    cuda_ipc.reductions.reduce_tensor, cuda_ipc.reductions.rebuild_cuda_tensor = reduce_tensor, rebuild
    storages: Any = torch.UntypedStorage
    storages._release_ipc_counter_cuda = release
