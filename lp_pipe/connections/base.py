"""The one abstraction between processes: a framed, duplex, authenticated connection."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from threading import get_ident

from lp_pipe.connections.frames import Frame
from lp_pipe.private_python import release_if_held_here

OnFrame = Callable[[Frame], None]
OnClose = Callable[[str], None]
OnConnection = Callable[["Connection"], None]


class Connection(ABC):
    """A connection that carries frames in order, both ways.

    `start` must be called once; frames that arrive earlier wait for it. From then on `on_frame` is called for every
    frame, one after another, in the carrier's thread (within one process: in the sender's thread). It must not block.
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
        """Send a frame, from any thread. Blocks while the peer does not read (back-pressure).

        The caller may reuse the buffers when this returns.

        Raises:
            Unavailable: the connection is closed; the message holds the reason.
        """

    can_send_later = False

    def send_later(self, frame: Frame) -> None:
        """Send a small frame with the next `flush` or `send`, which must follow.

        Only for connections with `can_send_later`. Raises only what `send` raises for a frame over the limits.
        """
        raise NotImplementedError

    def flush(self) -> None:
        """Send what `send_later` has left; blocks and raises as `send`."""
        raise NotImplementedError

    can_begin_sending = False

    @property
    def sent_bytes(self) -> int:
        """The number of bytes sent, for carriers that count them: a waiting thread sees that sending proceeds."""
        return 0

    def has_room_for(self, size: int) -> bool:
        """Return whether a frame of `size` bytes would be sent now without waiting; False where that is unknown."""
        return False

    def begin_sending(self, frame: Frame) -> bool:
        """Send as much as goes without waiting; return whether that is all, else `finish_sending` must follow.

        Or `continue_sending`, until it returns True. Only for connections with `can_begin_sending`. The buffers must
        not change before all is sent. Raises as `send`.
        """
        raise NotImplementedError

    def continue_sending(self) -> bool:
        """Send more of the rest without waiting; return whether all is sent. Raises as `send`."""
        raise NotImplementedError

    def finish_sending(self) -> None:
        """Send the rest; blocks and raises as `send`."""
        raise NotImplementedError

    def is_same_process(self) -> bool:
        """Return whether the peer is in this process, so that buffers may be any objects."""
        return False

    @abstractmethod
    def close(self, reason: str = "closed") -> None:
        """Close both directions; the peer's `on_close` gets `reason`. Idempotent; never blocks for long."""

    def is_sending_here(self) -> bool:
        """Return whether the calling code has interrupted its own thread in the middle of sending.

        What it sends goes out only when the interrupted code resumes, so it must not wait for an answer.
        """
        return False

    def recover(self) -> None:
        """Release what the calling thread still holds after an exception interrupted it between two bytecodes.

        Called by the code that began the interrupted operation, never by code inside it.
        """
        release_if_held_here(self._state_lock)

    @property
    def closed_reason(self) -> str | None:
        """The reason for which this connection is closed, or None while it is open."""
        return self._closed_reason

    def _mark_closed(self, reason: str) -> bool:
        """Store the first reason and return True; call `on_close` once the connection is both closed and started."""
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
    """A connection that can be read by the very thread that waits for a reply, which saves a switch between threads.

    In place of `start`: call `attach` once. A thread for which `try_reading` returns True may then `wait` and `read`,
    until it calls `done_reading`.
    """

    def __init__(self, peer: str) -> None:
        super().__init__(peer)
        # The ident of the reading thread. Claiming the role and recording the owner is one step of C code, so that no
        # interruption leaves the role without an owner. It is 0 once nothing will be read again.
        self._reader_of: dict[str, tuple[int]] = {}

    @abstractmethod
    def attach(self, on_frame: OnFrame, on_close: OnClose) -> None:
        """Set the callbacks, like `start`, but deliver frames only inside `read`."""

    can_read_once = False

    def read_once(self) -> None:
        """Read once, without waiting. As long as there is more to read, the descriptor is readable.

        Only for connections with `can_read_once`.
        """
        raise NotImplementedError

    def try_reading(self) -> bool:
        """Make the calling thread the only reader; False when there is a reader, or nothing will be read again."""
        reader = (get_ident(),)
        return self._reader_of.setdefault("reader", reader) is reader

    def is_read_here(self) -> bool:
        """Return whether the calling thread is the reader, which means that it was interrupted while it read."""
        return self._reader_of.get("reader") == (get_ident(),)

    def read_alone(self, timeout_s: float | None) -> bool:
        """Call `wait` and `read` once as the only reader; False when another thread is the reader."""
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
        """Return the descriptor that becomes readable; -1 after the connection's end."""

    @abstractmethod
    def wait(self, timeout_s: float | None) -> bool:
        """Wait until there is something to read, or the end; False after `timeout_s`, or on `interrupt`."""

    @abstractmethod
    def is_ready(self) -> bool:
        """Return whether `wait` would return at once."""

    @property
    @abstractmethod
    def is_inside_frame(self) -> bool:
        """Whether a frame has arrived in part."""

    @property
    @abstractmethod
    def missing_bytes(self) -> int:
        """The number of bytes that must still arrive to complete the frame that has arrived in part; 0 outside one."""

    @abstractmethod
    def be_ready_at(self, size: int) -> None:
        """Make `wait` return only when `size` bytes have arrived, when no more fit in, or at the end."""

    @abstractmethod
    def is_stuck_here(self) -> bool:
        """Return whether the calling code interrupted its thread where nothing can be read until that resumes."""

    @abstractmethod
    def read_inside(self, timeout_s: float | None) -> None:
        """Call `wait` and `read` in code that has interrupted the reading thread, which must not be stuck."""

    @abstractmethod
    def has_peer_closed(self) -> bool:
        """Return whether the peer has closed its side, read up to there or not; any thread."""

    @abstractmethod
    def make_interruptible(self) -> None:
        """Enable `interrupt`; call this before the first `wait`."""

    @abstractmethod
    def interrupt(self) -> None:
        """End the current or the next `wait`; any thread."""

    @abstractmethod
    def read_next(self) -> None:
        """Call `wait` and `read` in one step, in threads that no signal interrupts."""

    @abstractmethod
    def read(self) -> None:
        """Deliver all that has arrived, without waiting; an exception of `on_frame` ends the connection."""


class Listener(ABC):
    """An object that accepts connections at `endpoint` until it is closed."""

    endpoint: str

    @abstractmethod
    def close(self, reason: str = "closed") -> None:
        """Stop accepting; connections that were accepted stay open.

        reason: sent, where the carrier can, to clients that have connected and were not accepted yet.
        """
