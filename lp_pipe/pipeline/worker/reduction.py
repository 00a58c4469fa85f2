"""The sum of gradients over the replicas of a worker's stages, to the same bits on each of them.

Replicas on one host add up in memory that all see (collectives/shared_memory.py), others over channels
(collectives/direct.py). The order of the additions is that of the ranks in both.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from lp_pipe.collectives.backend import Backend, GenerationOver
from lp_pipe.collectives.direct import DirectBackend
from lp_pipe.collectives.meeting_facts import Facts, open_shared
from lp_pipe.connections import run_endpoints
from lp_pipe.errors import ChannelClosed, PipelineError
from lp_pipe.membership import Membership
from lp_pipe.pipeline.worker.channel_ends import ChannelEnds
from lp_pipe.pipeline.worker.neighbours import Neighbours
from lp_pipe.private_torch import buffers_of
from lp_pipe.training.buffer_snapshot import BufferSnapshot, set_buffer
from lp_pipe.training.state_shards import is_dense

_BUFFER_BYTES = 4 << 20
_LINE_BYTES = 64
_CREDITS = 2  # parts, and sums
_CALLS = 1 << 20  # tags of the channels for each operation of the pipeline
_SHARING_KINDS = ("auto", "shm", "inproc")


class Reduction(ChannelEnds[int]):
    """A replica's part in the sum. All replicas of the worker call `reduce` once a step.

    An operation that was aborted leaves no backend; the next one joins the replicas anew.
    """

    def __init__(self, neighbours: Neighbours) -> None:
        super().__init__(neighbours.device)  # by the other replica
        worker, self._replica = neighbours.place
        own, ranks = neighbours.rank, neighbours.ranks.of(worker)
        self._count = len(ranks)
        self._worker = worker
        self._can_share = neighbours.kind in _SHARING_KINDS and neighbours.device.type == "cpu"
        self._hub = run_endpoints.endpoint_to_register(neighbours.hub.endpoint)
        others = [(replica, other) for replica, other in enumerate(ranks) if other != own]
        self._receivers = {
            replica: neighbours.receiver(f"gradients of rank {other} for {own}", _CREDITS) for replica, other in others
        }
        self._senders = {
            replica: neighbours.sender(other, f"gradients of rank {own} for {other}") for replica, other in others
        }
        self._backend: Backend | None = None
        self._buffers: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        self._shared: _SharedGradients | None = None
        self._tag = 0
        self._aborted: tuple[int, str] = (-1, "")

    def reduce(
        self, tag: int, parameters: Sequence[nn.Parameter], modules: Sequence[nn.Module], before: BufferSnapshot
    ) -> None:
        """Add up the gradients of all replicas, in rank order; all replicas get the buffers of replica 0.

        If a parameter has no gradient on some replicas (too few micro-batches), its sum is that of the others.

        modules: all of the stages. before: their buffers before the step, when all replicas had the same.

        Raises:
            PipelineError: a gradient is sparse.
            ChannelClosed: another replica has ended, or operation `tag` was aborted.
        """
        if self._count == 1:
            return
        with self.joined(tag) as backend:
            self._reduce(backend, tag, parameters, modules, before)

    def share_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Let gradients lie in memory that the replicas share, if they share any, from the next backward on.

        That takes the memory of all gradients in all steps, but little of the heap. The replicas are joined.
        """
        assert self._backend is not None, "the caller is in `joined`"
        if self._shared is None and self._can_share and not isinstance(self._backend, DirectBackend):
            self._shared = _SharedGradients(self._backend, parameters)

    @contextlib.contextmanager
    def joined(self, tag: int) -> Iterator[Backend]:
        """Join the replicas for collectives in operation `tag`, which all of them make in the body.

        Raises:
            ChannelClosed: as `reduce`.
        """
        self._tag = tag
        try:
            backend = self._joined(tag)
            aborted, reason = self._aborted  # after the backend is known: `abort` goes the other way
            if tag <= aborted:
                raise ChannelClosed(reason)
            yield backend
        except GenerationOver as error:
            raise ChannelClosed(str(error)) from error

    def abort(self, tag: int, reason: str) -> None:
        self._aborted = max(self._aborted, (tag, reason))
        super().abort(_last_call(tag), reason)
        if self._backend is not None and self._tag <= tag:
            self._backend.abort(reason)

    def discard(self) -> None:
        super().discard()
        self._leave()

    def close(self, reason: str) -> None:
        self._leave()
        super().close(reason)

    def _leave(self) -> None:
        backend, self._backend = self._backend, None
        self._buffers.clear()
        if self._shared is not None:
            self._shared.close()
            self._shared = None
        if backend is not None:
            backend.close()

    def _joined(self, tag: int) -> Backend:
        """Return what joins the replicas. They tell each other where they are when they meet first."""
        if self._backend is None:
            facts, file = Facts.own(self._hub, can_share=self._can_share)
            for sender in self._senders.values():
                self._sending(sender)(tag * _CALLS, facts.to_bytes())
            told = {replica: self._receiving(receiver)(tag * _CALLS) for replica, receiver in self._receivers.items()}
            told[self._replica] = facts.to_bytes()
            members = tuple(f"replica {replica} of worker {self._worker}" for replica in range(self._count))
            endpoints = tuple(told[replica] for replica in range(self._count))
            membership = Membership(f"worker {self._worker}", tag, self._replica, members, endpoints)
            self._backend = open_shared(membership, file) or self._direct(membership)
        if isinstance(self._backend, DirectBackend) and self._backend.number < tag * _CALLS:
            self._backend.number = tag * _CALLS
        return self._backend

    def _direct(self, membership: Membership) -> DirectBackend:
        return DirectBackend(
            membership,
            {replica: self._sending(sender) for replica, sender in self._senders.items()},
            {replica: self._receiving(receiver) for replica, receiver in self._receivers.items()},
            lambda reason, grace_s: None,  # the channels are aborted, and closed, on their own
            device=self._device,
        )

    def _reduce(
        self,
        backend: Backend,
        tag: int,
        parameters: Sequence[nn.Parameter],
        modules: Sequence[nn.Module],
        before: BufferSnapshot,
    ) -> None:
        own = [_flat(parameter.grad) for parameter in parameters]
        changed = _changed(modules, before) if self._replica == 0 else {}
        has_changed, present = _told_by_all(backend, [flat is not None for flat in own], bool(changed))
        if has_changed:
            for sender in self._senders.values() if self._replica == 0 else ():
                self._sending(sender)(_last_call(tag), changed)
        for index, (flat, on) in enumerate(zip(own, present, strict=True)):
            if flat is None and on:
                parameters[index].grad = torch.empty_like(parameters[index])
                own[index] = _flat(parameters[index].grad)
        counts = {parameter: len(on) for parameter, on in zip(parameters, present, strict=True)}
        reduced = self._shared.reduce(backend, counts) if self._shared is not None else set()
        by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for parameter, flat, on in zip(parameters, own, present, strict=True):
            if flat is None or parameter in reduced:
                continue
            if len(on) == self._count:
                by_kind.setdefault((flat.dtype, flat.device), []).append(flat)
            else:
                _reduce_partial(backend, flat, on)
        for kind, gradients in by_kind.items():
            self._reduce_together(backend, kind, gradients)
        if self._replica:
            before.restore()  # what only this replica's micro-batches have changed
        if has_changed and self._replica:
            for (index, name), value in self._receiving(self._receivers[0])(_last_call(tag)).items():
                set_buffer(modules[index], name, value)

    def _reduce_together(
        self, backend: Backend, kind: tuple[torch.dtype, torch.device], gradients: Sequence[Tensor]
    ) -> None:
        """Add up gradients that all replicas have, in pieces of one buffer, which is kept for the next step."""
        dtype, device = kind
        most = min(sum(map(len, gradients)), _BUFFER_BYTES // dtype.itemsize)
        buffer = self._buffers.get(kind)
        if buffer is None or len(buffer) < most:
            buffer = self._buffers[kind] = backend.empty(most, dtype).to(device)
        for pieces in _in_pieces(gradients, most):
            together = buffer[: sum(map(len, pieces))]
            views = together.split([len(piece) for piece in pieces])
            for view, piece in zip(views, pieces, strict=True):
                view.copy_(piece)
            backend.all_reduce(together)
            for view, piece in zip(views, pieces, strict=True):
                piece.copy_(view)


class _SharedGradients:
    """Memory for gradients that all replicas see. Hooks move each gradient there as soon as autograd has made it.

    Autograd allocates gradients one by one, and all of them go at the end of a step: in a heap they leave holes, which
    those of the next step do not fit (docs/decisions/063).
    """

    def __init__(self, backend: Backend, parameters: Sequence[nn.Parameter]) -> None:
        self._groups: list[tuple[Tensor, list[nn.Parameter]]] = []  # which are added up together
        self._places: dict[nn.Parameter, Tensor] = {}
        by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in parameters:
            if parameter.requires_grad and is_dense(parameter):
                by_dtype.setdefault(parameter.dtype, []).append(parameter)
        for same in by_dtype.values():
            group: list[nn.Parameter] = []
            for parameter in same:
                if group and sum(_lines(one) for one in group) + _lines(parameter) > _BUFFER_BYTES // _LINE_BYTES:
                    self._add_group(backend, group)
                    group = []
                group.append(parameter)
            self._add_group(backend, group)
        self._hooks = [one.register_post_accumulate_grad_hook(self._move) for one in self._places]

    def _add_group(self, backend: Backend, parameters: list[nn.Parameter]) -> None:
        dtype = parameters[0].dtype
        per_line = _LINE_BYTES // dtype.itemsize
        memory = backend.empty(sum(map(_lines, parameters)) * per_line, dtype).zero_()
        at = 0
        for parameter in parameters:
            place = memory[at : at + parameter.numel()]
            self._places[parameter] = place.as_strided(parameter.shape, parameter.stride())
            at += _lines(parameter) * per_line
        self._groups.append((memory, parameters))

    @torch.no_grad()
    def _move(self, parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter), "it was registered with one"
        gradient, place = parameter.grad, self._places.get(parameter)
        if place is not None and gradient is not None and gradient is not place and gradient.layout is torch.strided:
            place.copy_(gradient)
            parameter.grad = place

    def reduce(self, backend: Backend, counts: Mapping[nn.Parameter, int]) -> set[nn.Parameter]:
        """Add up the gradients of each group that all replicas have, and return the parameters of these groups.

        counts: how many replicas have a gradient; a group may have parameters of which none has.
        """
        found: set[nn.Parameter] = set()
        for memory, parameters in self._groups:
            if all(counts[one] in (0, backend.world_size) for one in parameters):
                for parameter in parameters:
                    if counts[parameter]:
                        self._move(parameter)
                    else:
                        self._places[parameter].zero_()
                backend.all_reduce(memory)
                found.update(parameters)
        return found

    def close(self) -> None:
        """Leave gradients where they are from now on."""
        for hook in self._hooks:
            hook.remove()
        self._places.clear()
        self._groups.clear()


def _lines(parameter: Tensor) -> int:
    return -(-parameter.nbytes // _LINE_BYTES)


def _in_pieces(tensors: Sequence[Tensor], most: int) -> Iterator[list[Tensor]]:
    """Yield pieces of the tensors, in order, that have at most so many elements together."""
    pieces: list[Tensor] = []
    left = most
    for tensor in tensors:
        begin = 0
        while begin < len(tensor):
            piece = tensor[begin : begin + left]
            pieces.append(piece)
            begin, left = begin + len(piece), left - len(piece)
            if not left:
                yield pieces
                pieces, left = [], most
    if pieces:
        yield pieces


def _last_call(tag: int) -> int:
    return (tag + 1) * _CALLS - 1


def _told_by_all(backend: Backend, present: Sequence[bool], has_changed: bool) -> tuple[bool, list[list[int]]]:
    """Return whether replica 0 has changed buffers, and for each gradient the replicas that have it."""
    own = torch.tensor([has_changed, *present], device="cpu")
    table = torch.empty(backend.world_size * len(own), dtype=torch.bool, device="cpu")
    backend.all_gather(table, own)
    first, *others = table.view(backend.world_size, -1).t().tolist()
    return first[0], [[replica for replica, has in enumerate(column) if has] for column in others]


def _reduce_partial(backend: Backend, flat: Tensor, present: Sequence[int]) -> None:
    """Put the sum of the gradients that the replicas `present` have into `flat`, on all replicas."""
    parts = torch.empty(backend.world_size * len(flat), dtype=flat.dtype, device=flat.device)
    backend.all_gather(parts, flat)
    first, *others = (parts.view(backend.world_size, -1)[replica] for replica in present)
    flat.copy_(first)
    for part in others:
        flat += part


def _changed(modules: Sequence[nn.Module], before: BufferSnapshot) -> dict[tuple[int, str], Tensor]:
    """Return the written buffers by module index and name; not all buffers, because constant masks may be large."""
    written = before.written()
    return {
        (index, name): buffer
        for index, module in enumerate(modules)
        for name, buffer in buffers_of(module).items()
        if buffer is not None and (module, name) in written
    }


def _flat(gradient: Tensor | None) -> Tensor | None:
    """Return the gradient as it lies in memory: autograd gives it its parameter's strides, which are dense."""
    if gradient is None:
        return None
    if gradient.layout is not torch.strided:
        raise PipelineError(
            "replicas cannot add up sparse gradients, such as those of nn.Embedding(…, sparse=True). Leave out "
            "sparse=True, or give this stage one replica"
        )
    return gradient.as_strided((gradient.numel(),), (1,))
