"""The one abstraction between processes: a framed, duplex, authenticated connection."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from threading import get_ident

from lp_pipe.connections.frames import Frame
from lp_pipe.connections.thread_locks import release_if_held_here

OnFrame = Callable[[Frame], None]
OnClose = Callable[[str], None]
OnConnection = Callable[["Connection"], None]


class Connection(ABC):
    """Frames in order, both ways.

    `start` must be called once, before which arriving frames wait. Then `on_frame` is called for every frame, one
    after another, in the carrier's thread (in one process: in the sender's thread), and must not block;
    `on_close(reason)` is called exactly once, after the last frame.
    """

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self._closed_reason: str | None = None
        self._on_close: OnClose | None = None
        self._state_lock = threading.RLock()

    @abstractmethod
    def start(self, on_frame: OnFrame, on_close: OnClose) -> None:
        """Begin to deliver frames."""

    @abstractmethod
    def send(self, frame: Frame) -> None:
        """Send a frame; any thread. Blocks while the peer does not read (back-pressure).

        The buffers are free again when this returns.

        Raises:
            Unavailable: the connection is closed; the message holds the reason.
        """

    can_begin_sending = False
    is_same_process = False  # whether the peer is in this process, so that buffers may be any objects

    @property
    def sent_bytes(self) -> int:
        """Where a carrier counts them, so that who waits sees that it goes on."""
        return 0

    def has_room_for(self, size: int) -> bool:
        """Whether a frame of so many bytes would go without waiting if sent now; False where that is not known."""
        return False

    def begin_sending(self, frame: Frame) -> bool:
        """Send as much as goes without waiting, if `can_begin_sending`; else False: `finish_sending` must follow.

        Until then the buffers must not change. Raises as `send`.
        """
        raise NotImplementedError

    def finish_sending(self) -> None:
        """Send the rest; blocks like `send`, and raises as it does."""
        raise NotImplementedError

    @abstractmethod
    def close(self, reason: str = "closed") -> None:
        """Close both directions; the peer's `on_close` gets `reason`. Idempotent, never blocks for long."""

    def is_sending_here(self) -> bool:
        """Return whether the calling thread was interrupted in the middle of sending.

        What it sends now goes out when the interrupted code goes on, so it must not wait for an answer.
        """
        return False

    def recover(self) -> None:
        """Give back what the calling thread has kept because an exception interrupted it, between any two bytecodes.

        For the code that has begun the interrupted operation, and no code inside it.
        """
        release_if_held_here(self._state_lock)

    @property
    def closed_reason(self) -> str | None:
        """Why this connection is closed, or None while it is open."""
        return self._closed_reason

    def _mark_closed(self, reason: str) -> bool:
        """Remember the first reason, True; call `on_close` once it is both closed and started."""
        with self._state_lock:
            if self._closed_reason is not None:
                return False
            self._closed_reason = reason
            on_close = self._on_close
        if on_close is not None:
            on_close(reason)
        return True

    def _attach(self, on_close: OnClose) -> None:
        with self._state_lock:
            assert self._on_close is None, "a connection is started once"
            self._on_close = on_close
            reason = self._closed_reason
        if reason is not None:
            on_close(reason)


class PulledConnection(Connection):
    """A connection that can also be read by the very thread that waits for what arrives: that saves a thread's hop.

    Instead of `start`: `attach` once, then whoever gets `try_reading` may `wait` and `read` until `done_reading`.
    """

    def __init__(self, peer: str) -> None:
        super().__init__(peer)
        # The number of the thread that reads. Taking it and saying who has it is one step of C code, so that no
        # interruption leaves it without an owner; 0 once nothing will ever be read again.
        self._reader_of: dict[str, tuple[int]] = {}

    @abstractmethod
    def attach(self, on_frame: OnFrame, on_close: OnClose) -> None:
        """Like `start`, but frames are delivered only inside `read`."""

    def try_reading(self) -> bool:
        """Become the one thread that reads; False when there is one, or nothing will ever be read again."""
        reader = (get_ident(),)
        return self._reader_of.setdefault("reader", reader) is reader

    def is_read_here(self) -> bool:
        """Whether the calling thread is the one that reads, and so was interrupted there."""
        return self._reader_of.get("reader") == (get_ident(),)

    def read_alone(self, timeout_s: float | None) -> bool:
        """`wait` and `read` once, as the one thread that reads; False when that is another."""
        if not self.try_reading():
            return False
        try:
            if self.wait(timeout_s):
                self.read()
        finally:
            self.done_reading()
        return True

    @abstractmethod
    def done_reading(self) -> None:
        """Let another thread read."""

    @abstractmethod
    def fileno(self) -> int:
        """The descriptor that becomes readable; -1 after the end."""

    @abstractmethod
    def wait(self, timeout_s: float | None) -> bool:
        """Wait until there is something to read (or the end); False when `timeout_s` has passed, or on `interrupt`."""

    @abstractmethod
    def is_ready(self) -> bool:
        """Whether a `wait` would return at once."""

    @property
    @abstractmethod
    def is_inside_frame(self) -> bool:
        """Whether a frame has come in part."""

    @abstractmethod
    def be_ready_at(self, size: int) -> None:
        """From now on it is ready, and ends a `wait`, when so many bytes are there, or no more fit, or at the end."""

    @abstractmethod
    def is_stuck_here(self) -> bool:
        """Whether the calling thread was interrupted where nothing can be read before it goes on."""

    @abstractmethod
    def read_inside(self, timeout_s: float | None) -> None:
        """`wait` and `read` in code that has interrupted this thread, which is the one that reads, and is not stuck."""

    @abstractmethod
    def has_peer_closed(self) -> bool:
        """Whether the peer has closed its side, be it read or not; any thread."""

    @abstractmethod
    def make_interruptible(self) -> None:
        """Before the first `wait`: `interrupt` will work."""

    @abstractmethod
    def interrupt(self) -> None:
        """End a `wait`, or the next one; any thread."""

    @abstractmethod
    def read_next(self) -> None:
        """`wait` and `read` in one, for threads that no signal interrupts."""

    @abstractmethod
    def read(self) -> None:
        """Deliver all that has arrived, without waiting; an exception of `on_frame` ends the connection."""


class Listener(ABC):
    """Accepts connections at `endpoint` until it is closed."""

    endpoint: str

    @abstractmethod
    def close(self, reason: str = "closed") -> None:
        """Stop accepting; connections that were accepted stay open.

        reason: for those who have connected, and wait to be accepted, where they can be told.
        """
