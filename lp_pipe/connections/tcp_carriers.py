"""The carriers between hosts, by the scheme of an endpoint; each is imported when it is first needed."""

from types import ModuleType

from lp_pipe.connections import tcp_endpoint

TRANSPORTS = {"auto": tcp_endpoint.TLS, "tls": tcp_endpoint.TLS, "grpc": tcp_endpoint.SECURE}


def scheme_of(transport: str) -> str:
    """Return the scheme of the endpoints between hosts for `transport` ("auto", "tls" or "grpc").

    Raises:
        ValueError: it is none of these.
    """
    if transport not in TRANSPORTS:
        raise ValueError(f"transport={transport!r} must be 'auto', 'tls' or 'grpc'")
    return TRANSPORTS[transport]


def carrier_of(endpoint: str) -> ModuleType:
    """Return the module with the `connect` and `listen` that take this TCP endpoint and a run's credentials."""
    if endpoint.startswith(tcp_endpoint.TLS):
        from lp_pipe.connections import tls  # ssl is of no use to most processes

        return tls
    from lp_pipe.connections import grpc_stream  # grpc is slow to import, and must not be loaded before a fork

    return grpc_stream
