"""What the two ends of a channel on one host tell each other without a word on the wire: numbers in shared memory.

    sender                                           receiver
      slot's number, tag; one more sent    ─────►
                                           ◄─────      one more taken: a credit
                                           ◄─────      closed: look at the connection, which says why
      asleep? then the other end nudges it by a frame, and only then

Each number is written by one end. A message counts once it is complete in memory, so a process may be killed at any
moment: what it had not counted was not sent, and the end of its connection wakes whoever sleeps.
"""

import mmap
import os
import platform
import threading
import time

from lp_pipe.channels import kinds
from lp_pipe.channels.segments import announcement, opened
from lp_pipe.connections.finalizer import add_finalizer

# Others may see stores in another order than they were made in; Python has no means to forbid it.
is_shm_queue_supported = kinds.is_shm_supported() and platform.machine() in ("x86_64", "AMD64")

_SENT, _TAKEN, _SENDER_SLEEPS, _RECEIVER_SLEEPS, _CLOSED = range(0, 40, 8)  # each in a cache line of its own
_ENTRIES = 40
_ENTRY = 2
_A_MOMENT_S = 1e-2  # for which a receiver that was at work counts as alive
MANY_CREDITS = 4  # from here on a sender without any goes on when half of them are back


class ShmQueue:
    """One end's view; each end's methods are called by one thread at a time. `sent` and `taken` count messages."""

    def __init__(self, mapping: mmap.mmap, credits: int) -> None:
        self._numbers = memoryview(mapping).cast("q")
        self._credits = credits
        self._wakes_at = credits // 2 if credits >= MANY_CREDITS else credits
        self._fence = threading.Lock()
        self.sent = 0  # by the sender; at the receiver: how many of them it has seen
        self._taken_before, self._asked_at = 0, 0.0
        self.sender_doorbell = Doorbell(self._numbers, self._fence, _TAKEN, _SENDER_SLEEPS)
        self.receiver_doorbell = Doorbell(self._numbers, self._fence, _SENT, _RECEIVER_SLEEPS)

    @staticmethod
    def make(credits: int) -> "tuple[ShmQueue, bytes]":
        """The receiver's; and what lets the sender open it as long as the queue lives."""
        descriptor = os.memfd_create("lp_pipe-queue", os.MFD_CLOEXEC)
        size = 8 * (_ENTRIES + _ENTRY * credits)
        os.ftruncate(descriptor, size)
        queue = ShmQueue(mmap.mmap(descriptor, size), credits)
        add_finalizer(queue, os.close, descriptor)
        return queue, announcement(descriptor, [credits])

    @staticmethod
    def open(announced: bytes) -> "ShmQueue":
        """The sender's.

        Raises:
            OSError: the receiver is gone, or lives where this process cannot see it.
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
        """Whether the receiver is open, and has taken something in the moment since this was last asked.

        A killed one may count for that long, and no longer.
        """
        before, asked_at = self._taken_before, self._asked_at
        self._taken_before, self._asked_at = self.taken, time.monotonic()
        has_taken = self._taken_before != before and self._asked_at - asked_at < _A_MOMENT_S
        return has_taken and not self._numbers[_CLOSED]

    def close(self) -> None:
        """By the receiver, which takes nothing more."""
        self._numbers[_CLOSED] = 1

    def publish(self, tag: int, token: int) -> bool:
        """One more message, for which there is a credit; whether the receiver must be nudged."""
        at = _ENTRIES + _ENTRY * (self.sent % self._credits)
        self._numbers[at], self._numbers[at + 1] = tag, token
        self.sent += 1
        self._numbers[_SENT] = self.sent
        return self.receiver_doorbell.must_ring()

    def next(self) -> tuple[int, int] | None:
        """Tag and token of the oldest message that was not seen yet; `advance` to the one behind it."""
        if self.sent == self._numbers[_SENT]:
            return None
        at = _ENTRIES + _ENTRY * (self.sent % self._credits)
        return self._numbers[at], self._numbers[at + 1]

    def advance(self) -> None:
        self.sent += 1

    def take(self) -> bool:
        """Give a credit back; whether the sender must be nudged.

        A sender that ran out of many credits sleeps until half of them are back: to be woken costs more than to send.
        """
        taken = self._numbers[_TAKEN] + 1
        self._numbers[_TAKEN] = taken
        return self._numbers[_SENT] - taken <= self._wakes_at and self.sender_doorbell.must_ring()


class Doorbell:
    """How the end that waits for a number to grow falls asleep without missing it."""

    def __init__(self, numbers: memoryview, fence: threading.Lock, count: int, asleep: int) -> None:
        self._numbers = numbers
        self._fence = fence
        self._count = count
        self._asleep = asleep

    def count(self) -> int:
        """What it waits for to change."""
        return self._numbers[self._count]

    def arm(self, seen: int) -> bool:
        """Before it sleeps; False when the number is not `seen` any more."""
        self._numbers[self._asleep] = 1
        self._order()
        if self._numbers[self._count] == seen:
            return True
        self._numbers[self._asleep] = 0
        return False

    def disarm(self) -> None:
        self._numbers[self._asleep] = 0

    def must_ring(self) -> bool:
        """The other end has changed the number: whether this one sleeps."""
        self._order()
        if not self._numbers[self._asleep]:
            return False
        self._numbers[self._asleep] = 0
        return True

    def _order(self) -> None:
        """Taking a lock is what keeps the processor from loading one number before it has stored the other."""
        with self._fence:
            pass
