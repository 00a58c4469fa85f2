"""Calls between nodes: request and response over one connection per client and server."""

from lp_pipe.rpc.batching import batched_handler as batched_handler
from lp_pipe.rpc.client import CourierClient as CourierClient
from lp_pipe.rpc.client import list_methods as list_methods
from lp_pipe.rpc.server import CourierServer as CourierServer
from lp_pipe.rpc.server import Server as Server
