"""The last states of stage workers in memory: a worker's own, and those of the worker that it guards."""

import threading
from collections.abc import Callable
from concurrent.futures import Future

from lp_pipe.channels.packing import copied
from lp_pipe.context import context
from lp_pipe.pipeline.protocol import (
    ForgetMirrors,
    GetMirror,
    GoBack,
    Handlers,
    KeepMirror,
    ListMirrors,
    MakeMirror,
    Mirror,
    SetGuard,
    SettleMirrors,
    WorkerClient,
)
from lp_pipe.pipeline.saving.contents import Manifest, Saved
from lp_pipe.rpc.daemon_pool import DaemonPool
from lp_pipe.training.share_file import check_dense

_KEPT = 2  # while the newest mirror is on its way to its guard, all workers can go back only to the one before


class MirrorStore:
    """The mirrors that the worker `rank` holds.

    snapshot: returns the worker's state, not copied. restore: makes the worker go on from such a state.
    """

    def __init__(self, rank: int, snapshot: Callable[[], Saved], restore: Callable[[Saved], None]) -> None:
        self._rank = rank
        self._snapshot = snapshot
        self._restore = restore
        self._guard: WorkerClient | None = None
        self._held: dict[int, dict[int, Mirror]] = {}  # by rank, by step
        self._lock = threading.Lock()
        self._sent: Future[None] | None = None
        self._sending = DaemonPool(1, "mirrors")
        context().exit_stack.callback(self._sending.close)

    def handlers(self) -> Handlers:
        return dict(
            [
                SetGuard.by(self.set_guard),
                MakeMirror.by(self.make),
                SettleMirrors.by(self.settle),
                KeepMirror.by(self.keep),
                ListMirrors.by(self.list_held),
                GetMirror.by(self.get),
                GoBack.by(self.go_back),
                ForgetMirrors.by(self.forget),
            ]
        )

    def set_guard(self, command: SetGuard) -> None:
        self._guard = command.guard

    def make(self, command: MakeMirror) -> None:
        self._wait_until_sent()
        guard = self._guard
        assert guard is not None, "SetGuard comes before MakeMirror"
        share = self._snapshot()
        for name, value in share.weights.items():
            check_dense(("model", name), value)
        keep = KeepMirror(self._rank, Mirror(command.manifest, copied(share)))
        self.keep(keep)
        self._sent = self._sending.start(lambda: guard.do(keep))

    def settle(self, _: SettleMirrors) -> None:
        self._wait_until_sent()

    def keep(self, command: KeepMirror) -> None:
        with self._lock:
            held = self._held.setdefault(command.rank, {})
            held[command.mirror.manifest.step] = command.mirror
            for step in sorted(held)[:-_KEPT]:
                del held[step]

    def list_held(self, _: ListMirrors) -> dict[int, list[int]]:
        with self._lock:
            return {rank: list(held) for rank, held in self._held.items()}

    def get(self, command: GetMirror) -> Mirror:
        with self._lock:
            return self._held[command.rank][command.step]

    def go_back(self, command: GoBack) -> Manifest:
        with self._lock:
            mirror = self._held.get(self._rank, {}).get(command.step)
        if mirror is None:
            assert self._guard is not None, "SetGuard comes before GoBack"
            mirror = self._guard.do(GetMirror(self._rank, command.step))
            self.keep(KeepMirror(self._rank, mirror))
        self._restore(copied(mirror.share))  # optimizers go on in the very tensors that they are given
        self.forget(ForgetMirrors(command.step + 1))
        return mirror.manifest

    def forget(self, command: ForgetMirrors) -> None:
        with self._lock:
            for held in self._held.values():
                for step in [step for step in held if step >= command.first]:
                    del held[step]

    def _wait_until_sent(self) -> None:
        if self._sent is not None:
            self._sent.exception()  # a guard that has died does not get it; the conductor asks which worker holds what
