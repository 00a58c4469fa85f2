"""Handles at setup and clients at execution: how one node reaches another."""

from lp_pipe.handles.arguments import check_arguments as check_arguments
from lp_pipe.handles.arguments import declared_at as declared_at
from lp_pipe.handles.base import CourierHandle as CourierHandle
from lp_pipe.handles.base import Handle as Handle
from lp_pipe.handles.base import NoClientHandle as NoClientHandle
from lp_pipe.handles.dereference import Deferred as Deferred
from lp_pipe.handles.dereference import dereference as dereference
from lp_pipe.handles.dereference import find_handles as find_handles
from lp_pipe.handles.handle_pool import Pool as Pool
