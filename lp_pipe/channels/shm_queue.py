"""A queue of messages in shared memory, for the two ends of a channel on one host.

    sender                                           receiver
      slot's number, tag; one more sent    ─────►
                                           ◄─────      one more taken: a credit
                                           ◄─────      closed: the connection says why
      wakes the receiver by a frame if it sleeps, and the receiver the sender

Each number is written by one end only. A message counts once it is complete in memory, so a process may be killed at
any moment: a message that it had not counted was not sent, and the end of its connection wakes the other end.
"""

import mmap
import os
import platform
import threading
import time

from lp_pipe.channels import kinds
from lp_pipe.channels.segments import announcement, opened
from lp_pipe.connections.finalizer import add_finalizer

# Other processors may reorder stores, and Python has no memory barriers.
is_shm_queue_supported = kinds.is_shm_supported() and platform.machine() in ("x86_64", "AMD64")

_SENT, _TAKEN, _SENDER_SLEEPS, _RECEIVER_SLEEPS, _CLOSED = range(0, 40, 8)  # each in a cache line of its own
_ENTRIES = 40
_ENTRY = 2
_A_MOMENT_S = 1e-2  # a receiver that took something within this time counts as alive
MANY_CREDITS = 4  # from so many on, a sender without credits goes on when half of them are back


class ShmQueue:
    """An end of the queue. One thread at a time calls an end's methods.

    sent: counts messages, at the receiver those that it has seen.
    """

    def __init__(self, mapping: mmap.mmap, credits: int) -> None:
        self._numbers = memoryview(mapping).cast("q")
        self._credits = credits
        self._wakes_at = credits // 2 if credits >= MANY_CREDITS else credits
        self._fence = threading.Lock()
        self.sent = 0
        self._taken_before, self._asked_at = 0, 0.0
        self.sender_doorbell = Doorbell(self._numbers, self._fence, _TAKEN, _SENDER_SLEEPS)
        self.receiver_doorbell = Doorbell(self._numbers, self._fence, _SENT, _RECEIVER_SLEEPS)

    @staticmethod
    def make(credits: int) -> "tuple[ShmQueue, bytes]":
        """Make the receiver's end; return it with the announcement that lets the sender open it."""
        descriptor = os.memfd_create("lp_pipe-queue", os.MFD_CLOEXEC)
        size = 8 * (_ENTRIES + _ENTRY * credits)
        os.ftruncate(descriptor, size)
        queue = ShmQueue(mmap.mmap(descriptor, size), credits)
        add_finalizer(queue, os.close, descriptor)
        return queue, announcement(descriptor, [credits])

    @staticmethod
    def open(announced: bytes) -> "ShmQueue":
        """Open the sender's end.

        Raises:
            OSError: the receiver is gone, or in another pid namespace.
        """
        descriptor, (credits,) = opened(announced)
        try:
            return ShmQueue(mmap.mmap(descriptor, 0), credits)
        finally:
            os.close(descriptor)

    @property
    def taken(self) -> int:
        return self._numbers[_TAKEN]

    def is_being_read(self) -> bool:
        """Return whether the receiver is open, and has taken a message in the short time since the last such call.

        A receiver that was killed may count as alive for that long, and no longer.
        """
        before, asked_at = self._taken_before, self._asked_at
        self._taken_before, self._asked_at = self.taken, time.monotonic()
        has_taken = self._taken_before != before and self._asked_at - asked_at < _A_MOMENT_S
        return has_taken and not self._numbers[_CLOSED]

    def close(self) -> None:
        """Mark the queue as closed by the receiver, which takes nothing more."""
        self._numbers[_CLOSED] = 1

    def publish(self, tag: int, token: int) -> bool:
        """Add a message, for which there is a credit; return whether the receiver must be woken."""
        at = _ENTRIES + _ENTRY * (self.sent % self._credits)
        self._numbers[at], self._numbers[at + 1] = tag, token
        self.sent += 1
        self._numbers[_SENT] = self.sent
        return self.receiver_doorbell.must_ring()

    def next(self) -> tuple[int, int] | None:
        """Return tag and token of the oldest message that was not seen yet; `advance` moves on to the next."""
        if self.sent == self._numbers[_SENT]:
            return None
        at = _ENTRIES + _ENTRY * (self.sent % self._credits)
        return self._numbers[at], self._numbers[at + 1]

    def advance(self) -> None:
        self.sent += 1

    def take(self) -> bool:
        """Give a credit back; return whether the sender must be woken.

        A sender that ran out of many credits sleeps until half of them are back: waking it costs more than sending.
        """
        taken = self._numbers[_TAKEN] + 1
        self._numbers[_TAKEN] = taken
        return self._numbers[_SENT] - taken <= self._wakes_at and self.sender_doorbell.must_ring()


class Doorbell:
    """Lets one end sleep until a number changes, without missing the change."""

    def __init__(self, numbers: memoryview, fence: threading.Lock, count: int, asleep: int) -> None:
        self._numbers = numbers
        self._fence = fence
        self._count = count
        self._asleep = asleep

    def count(self) -> int:
        """Return the number that the end waits for."""
        return self._numbers[self._count]

    def arm(self, seen: int) -> bool:
        """Announce that this end is about to sleep; return False if the number is not `seen` any more."""
        self._numbers[self._asleep] = 1
        self._order()
        if self._numbers[self._count] == seen:
            return True
        self._numbers[self._asleep] = 0
        return False

    def disarm(self) -> None:
        self._numbers[self._asleep] = 0

    def must_ring(self) -> bool:
        """Return whether this end sleeps, now that the other end has changed the number."""
        self._order()
        if not self._numbers[self._asleep]:
            return False
        self._numbers[self._asleep] = 0
        return True

    def _order(self) -> None:
        """Order the preceding store before the following load: taking a lock is a memory barrier."""
        with self._fence:
            pass
