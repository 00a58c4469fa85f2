"""Channels: one directed edge between two stages that carries pytrees of tensors, in order and with credits."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lp_pipe.channels.hub import ChannelHub as ChannelHub
    from lp_pipe.channels.receiver import Receiver as Receiver
    from lp_pipe.channels.sender import Sender as Sender
    from lp_pipe.channels.sender import open_sender as open_sender

_MODULES = {"ChannelHub": "hub", "Receiver": "receiver", "Sender": "sender", "open_sender": "sender"}


def __getattr__(name: str) -> Any:
    """Import a name when it is first used: channels need torch, and programs that are only looked at do not load it."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
