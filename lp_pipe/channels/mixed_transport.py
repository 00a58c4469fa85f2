"""A transport for values that are partly on the host and partly on a GPU: two transports, one for each part.

    sender                                            receiver
      header: both parts' tokens and buffers    ──►  both parts begin to receive
      finish? (a note, before it closes)        ──►
                                                ◄──  finished: all GPU parts have arrived

Closing waits for that, because a GPU part may need the sender's process until it has arrived.
"""

import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lp_pipe.channels.async_receive import AsyncReceiver
from lp_pipe.channels.base import NoRoomError, Notify, TransferError, TransportReceiver, TransportSender
from lp_pipe.channels.packing import CPU, Layout
from lp_pipe.errors import Unavailable

_HEADER = struct.Struct("<QQB?")  # the host's token, the GPU's, the number of GPU buffers, whether all is on the host
_FINISH, _FINISHED = b"finish", b"finished"  # all other notes are the GPU transport's
_CLOSE_PATIENCE_S = 2.0


class MixedSender(TransportSender):
    """The sending end.

    can_send: whether the GPU's transport reaches this receiver; otherwise, and for a message for which it has no room,
        all tensors go through the host.
    """

    def __init__(
        self, host: TransportSender, gpu: TransportSender, can_send: Callable[[], bool] = lambda: True
    ) -> None:
        self._host = host
        self._gpu = gpu
        self._can_send = can_send
        self._next = 0
        self._gpu_tokens: dict[int, int] = {}
        self._has_sent = False
        self._notify: Notify | None = None
        self._finished = threading.Event()

    def begin(self, notify: Notify) -> None:
        self._notify = notify
        self._gpu.address = self.address
        self._gpu.begin(notify)

    def keeps_on_gpu(self) -> bool:
        return self._can_send()

    def on_note(self, note: bytes) -> None:
        if note == _FINISHED:
            self._finished.set()
        else:
            self._gpu.on_note(note)

    def write(self, layout: Layout, tensors: list[Tensor], credits: int) -> tuple[int, Sequence[Any]]:
        of_host, of_gpu = layout.parts
        on_gpu = [tensor for spec, tensor in zip(layout.tensor_specs, tensors, strict=True) if spec.is_on_gpu]
        is_all_on_host = bool(on_gpu) and not self._can_send()
        if not is_all_on_host:
            try:
                gpu_token, gpu_buffers = self._gpu.write(of_gpu, on_gpu, credits)
            except NoRoomError:
                is_all_on_host = True
        if is_all_on_host:
            nothing = of_host.parts[1]
            gpu_token, gpu_buffers = self._gpu.write(nothing, [], credits)
            of_host, on_host, on_gpu = layout, [tensor.cpu() for tensor in tensors], []
        else:
            on_host = [tensor for spec, tensor in zip(layout.tensor_specs, tensors, strict=True) if not spec.is_on_gpu]
        try:
            host_token, host_buffers = self._host.write(of_host, on_host, credits)
        except NoRoomError as error:  # the GPU's part is already on its way
            raise TransferError(str(error)) from error
        token = self._next
        self._next += 1
        self._gpu_tokens[token] = gpu_token
        self._has_sent |= bool(on_gpu)
        header = _HEADER.pack(host_token, gpu_token, len(gpu_buffers), is_all_on_host)
        return token, [header, *gpu_buffers, *host_buffers]

    def release(self, token: int) -> None:
        gpu_token = self._gpu_tokens.pop(token, None)
        if gpu_token is not None:
            self._gpu.release(gpu_token)

    def finish(self) -> None:
        if not self._has_sent or self._notify is None:
            return
        self._gpu.finish()
        with suppress(Unavailable):  # then the receiver waits for nothing
            self._notify(_FINISH)
            self._finished.wait(_CLOSE_PATIENCE_S)

    def close(self, reason: str) -> None:
        self._finished.set()
        self._host.close(reason)
        self._gpu.close(reason)
        self._gpu_tokens.clear()


class _Parcel(NamedTuple):
    on_host: Any
    on_gpu: Any
    is_all_on_host: bool


class MixedReceiver(TransportReceiver):
    """The receiving end.

    device: where the GPU's part goes.
    """

    def __init__(self, host: TransportReceiver, gpu: AsyncReceiver, device: torch.device = CPU) -> None:
        self._host = host
        self._gpu = gpu
        self._device = device
        self._notify: Notify | None = None

    def begin(self, notify: Notify) -> None:
        self._notify = notify
        self._gpu.address = self.address
        self._gpu.begin(notify)

    def on_note(self, note: bytes) -> None:
        if note == _FINISH:
            self._gpu.when_received(self._send_finished)
        else:
            self._gpu.on_note(note)

    def accept(self, token: int, buffers: Sequence[Any]) -> _Parcel:
        host_token, gpu_token, count, is_all_on_host = _HEADER.unpack(buffers[0])
        of_gpu, of_host = buffers[1 : 1 + count], buffers[1 + count :]
        return _Parcel(self._host.accept(host_token, of_host), self._gpu.accept(gpu_token, of_gpu), is_all_on_host)

    def read(self, layout: Layout, parcel: _Parcel) -> list[Tensor]:
        if parcel.is_all_on_host:
            pairs = zip(layout.tensor_specs, self._host.read(layout, parcel.on_host), strict=True)
            return [tensor.to(self._device) if spec.is_on_gpu else tensor for spec, tensor in pairs]
        of_host, of_gpu = layout.parts
        on_host = iter(self._host.read(of_host, parcel.on_host))
        on_gpu = iter(self._gpu.read(of_gpu, parcel.on_gpu))
        return [next(on_gpu if spec.is_on_gpu else on_host) for spec in layout.tensor_specs]

    def drop(self, parcel: _Parcel, then: Callable[[], None]) -> None:
        self._host.drop(parcel.on_host, lambda: self._gpu.drop(parcel.on_gpu, then))

    def end(self, reason: str) -> None:
        self._host.end(reason)
        self._gpu.end(reason)

    def close(self, reason: str) -> None:
        self._host.close(reason)
        self._gpu.close(reason)

    def _send_finished(self) -> None:
        assert self._notify is not None
        with suppress(Unavailable):  # the sender does not wait any more
            self._notify(_FINISHED)
