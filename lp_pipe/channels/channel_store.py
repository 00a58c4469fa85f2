"""A torch.distributed store without a server: two ranks send each other its entries over their channel."""

import pickle
import threading
from datetime import timedelta

from torch.distributed import Store  # type: ignore[attr-defined]

from lp_pipe.channels.base import Notify

CONNECT_PATIENCE_S = 30.0
LIMIT = timedelta(minutes=30)  # torch's default; the channel's connection notices a dead peer at once


class ChannelStore(Store):
    """The entries that the ranks need before they are connected. They travel as notes of the channel."""

    def __init__(self) -> None:
        super().__init__()
        self._entries: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._closed_reason: str | None = None
        self._notify: Notify | None = None

    def begin(self, notify: Notify) -> None:
        self._notify = notify

    def learn(self, note: bytes) -> None:
        key, value = pickle.loads(note)
        with self._changed:
            self._entries[key] = value
            self._changed.notify_all()

    def close(self, reason: str) -> None:
        with self._changed:
            self._closed_reason = self._closed_reason or reason
            self._changed.notify_all()

    def closed_reason(self) -> str | None:
        """Return why no more entries will come; None while they may."""
        return self._closed_reason

    def set(self, key: str, value: str | bytes) -> None:
        assert self._notify is not None
        note = pickle.dumps((key, value.encode() if isinstance(value, str) else bytes(value)))
        self.learn(note)
        self._notify(note)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._entries[key]

    def known(self, key: str) -> bytes:
        """Return the entry without waiting; b"" if it is not there yet."""
        return self._entries.get(key, b"")

    def wait(self, keys: list[str], timeout: timedelta = LIMIT) -> None:
        with self._changed:
            wanted = set(keys)
            self._changed.wait_for(lambda: self._closed_reason or wanted <= self._entries.keys(), CONNECT_PATIENCE_S)
            if not wanted <= self._entries.keys():
                raise RuntimeError(self._closed_reason or f"the other end sent nothing for {CONNECT_PATIENCE_S} s")

    def has_extended_api(self) -> bool:
        return False
