"""A stage worker's last states in memory: its own, and those of the worker that it guards, which may die."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

from lp_pipe.channels.packing import copied
from lp_pipe.context import context
from lp_pipe.pipeline.saving.contents import Manifest, Saved
from lp_pipe.rpc.daemon_pool import DaemonPool
from lp_pipe.training.share_file import check_dense

_KEPT = 2  # while the newest is on its way to its guard, the one before is what all can go back to


class Mirror(NamedTuple):
    """share: what a checkpoint would hold of a worker."""

    manifest: Manifest
    share: Saved


class MirrorStore:
    """Of one worker. Its public methods are also the worker's, for the conductor and for the worker that it guards.

    share: what a checkpoint would hold now, not copied. adopt: go on from such a share.
    """

    def __init__(self, rank: int, share: Callable[[], Saved], adopt: Callable[[Saved], None]) -> None:
        self._rank = rank
        self._share = share
        self._adopt = adopt
        self._guard: Any = None
        self._held: dict[int, dict[int, Mirror]] = {}  # by rank, by step
        self._lock = threading.Lock()
        self._sent: Future[None] | None = None
        self._sending = DaemonPool(1, "mirrors")
        context().exit_stack.callback(self._sending.close)

    def guarded_by(self, guards: Sequence[Any]) -> None:
        """From now on the worker that comes after this one in rank (for the last: the first) keeps its mirrors.

        guards: clients of all workers, by rank.
        """
        self._guard = guards[(self._rank + 1) % len(guards)]

    def mirror(self, manifest: Manifest) -> None:
        """Copy this worker's state in memory; the copy goes to the guard while training goes on.

        Waits until the one before has gone, so that no more than two are ever on their way.
        """
        self.settle_mirrors()
        share = self._share()
        for name, value in share.weights.items():
            check_dense(("model", name), value)
        mirror = Mirror(manifest, copied(share))
        self.keep_mirror(self._rank, mirror)
        self._sent = self._sending.start(lambda: self._guard.keep_mirror(self._rank, mirror))

    def settle_mirrors(self) -> None:
        """Wait until the guard has what is on its way to it; else that could come after it was told to forget it."""
        if self._sent is not None:
            self._sent.exception()  # a guard that has died misses it; the conductor asks who has what

    def keep_mirror(self, rank: int, mirror: Mirror) -> None:
        """Hold a worker's state, and the one before; forget older ones."""
        with self._lock:
            held = self._held.setdefault(rank, {})
            held[mirror.manifest.step] = mirror
            for step in sorted(held)[:-_KEPT]:
                del held[step]

    def mirrors_held(self) -> dict[int, list[int]]:
        """The steps of which this worker holds mirrors, by the rank whose state they are."""
        with self._lock:
            return {rank: list(held) for rank, held in self._held.items()}

    def mirror_of(self, rank: int, step: int) -> Mirror:
        """One that `mirrors_held` has named."""
        with self._lock:
            return self._held[rank][step]

    def go_back(self, step: int) -> Manifest:
        """Take this worker's state after so many steps, from its own memory or its guard's."""
        with self._lock:
            mirror = self._held.get(self._rank, {}).get(step)
        if mirror is None:
            mirror = self._guard.mirror_of(self._rank, step)
            self.keep_mirror(self._rank, mirror)
        self._adopt(copied(mirror.share))  # optimizers go on in the very tensors that they are given
        self.forget_mirrors(step + 1)
        return mirror.manifest

    def forget_mirrors(self, first: int = 0) -> None:
        """From that step on: the state is another one now, of which they are no past."""
        with self._lock:
            for held in self._held.values():
                for step in [step for step in held if step >= first]:
                    del held[step]
