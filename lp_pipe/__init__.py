"""lp_pipe: a program graph, declared once, that runs as threads, as processes, and across hosts."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lp_pipe.address import Address as Address
from lp_pipe.address import get_port_from_address as get_port_from_address
from lp_pipe.context import NodeContext as NodeContext
from lp_pipe.context import context as context
from lp_pipe.context import log_metrics as log_metrics
from lp_pipe.context import register_stop_handler as register_stop_handler
from lp_pipe.context import stop as stop
from lp_pipe.context import stop_event as stop_event
from lp_pipe.context import unregister_stop_handler as unregister_stop_handler
from lp_pipe.context import wait_for_stop as wait_for_stop
from lp_pipe.errors import DeadlineExceeded as DeadlineExceeded
from lp_pipe.errors import LaunchError as LaunchError
from lp_pipe.errors import LpPipeError as LpPipeError
from lp_pipe.errors import MethodNotFound as MethodNotFound
from lp_pipe.errors import NodeError as NodeError
from lp_pipe.errors import RemoteError as RemoteError
from lp_pipe.errors import SerializationError as SerializationError
from lp_pipe.errors import StateLost as StateLost
from lp_pipe.errors import Unavailable as Unavailable
from lp_pipe.handles import CourierHandle as CourierHandle
from lp_pipe.handles import Deferred as Deferred
from lp_pipe.handles import Handle as Handle
from lp_pipe.handles import Pool as Pool
from lp_pipe.launch import Run as Run
from lp_pipe.launch import launch as launch
from lp_pipe.nodes import CacheInfo as CacheInfo
from lp_pipe.nodes import CacherNode as CacherNode
from lp_pipe.nodes import CourierNode as CourierNode
from lp_pipe.nodes import MultiProcessingColocation as MultiProcessingColocation
from lp_pipe.nodes import MultiThreadingColocation as MultiThreadingColocation
from lp_pipe.nodes import Node as Node
from lp_pipe.nodes import PyClassNode as PyClassNode
from lp_pipe.nodes import PyNode as PyNode
from lp_pipe.nodes import cache_info as cache_info
from lp_pipe.program import Program as Program
from lp_pipe.resources import Resources as Resources
from lp_pipe.rpc import CourierClient as CourierClient
from lp_pipe.rpc import CourierServer as CourierServer
from lp_pipe.rpc import batched_handler as batched_handler
from lp_pipe.rpc import list_methods as list_methods

if TYPE_CHECKING:
    from lp_pipe.launch import ElasticRun as ElasticRun
    from lp_pipe.launch import launch_elastic as launch_elastic
    from lp_pipe.telemetry import sinks as sinks
else:  # few programs need them; type checkers would take any name for one of `__getattr__`
    _ON_FIRST_USE = ("ElasticRun", "launch_elastic", "sinks")

    def __getattr__(name: str) -> Any:
        if name not in _ON_FIRST_USE:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if name == "sinks":
            return import_module("lp_pipe.telemetry.sinks")
        return getattr(import_module("lp_pipe.launch"), name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *_ON_FIRST_USE} - {"Any", "TYPE_CHECKING", "import_module"})
