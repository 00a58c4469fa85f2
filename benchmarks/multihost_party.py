"""An end of the calls between two hosts: a server that answers over lp_pipe and over grpcio, or their client.

    python -m benchmarks.multihost_party serve ADDRESS                  < credentials
    python -m benchmarks.multihost_party call ENDPOINTS ROUNDS CALLS    < credentials

The first line on stdin is the credentials. The server says as JSON where it listens, and serves until stdin ends; the
client says how many microseconds the median call of each round took, by party. grpcio has the same certificates.
"""

import base64
import json
import pickle
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

import lp_pipe as lp
from benchmarks.calls import latency_us
from benchmarks.tcp import Target
from lp_pipe.connections.credentials import RUN_NAME, Credentials, use_credentials
from lp_pipe.rpc import Server

RAW = "grpcio unary, mTLS"
_INLINE, _POOLED = "lp_pipe, inline", "lp_pipe"


class LpPipe:
    def __init__(self, endpoint: str) -> None:
        self._client = lp.CourierClient(endpoint)

    def call(self) -> object:
        return self._client.add(1, 2)


class Raw:
    def __init__(self, endpoint: str, credentials: Credentials) -> None:
        tls = grpc.ssl_channel_credentials(credentials.authority, credentials.key, credentials.certificate)
        channel = grpc.secure_channel(endpoint, tls, [("grpc.ssl_target_name_override", RUN_NAME)])
        self._add = channel.unary_unary("/bench/add", pickle.dumps, pickle.loads)

    def call(self) -> object:
        return self._add((1, 2))


def serve(address: str, credentials: Credentials) -> None:
    servers = {name: Server(Target(), f"tls:{address}:0", thread_pool_size=size) for name, size in _pools().items()}
    raw = grpc.server(ThreadPoolExecutor(16))
    add = grpc.unary_unary_rpc_method_handler(lambda args, _: Target().add(*args), pickle.loads, pickle.dumps)
    raw.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench", {"add": add}),))
    pair = (credentials.key, credentials.certificate)
    tls = grpc.ssl_server_credentials([pair], credentials.authority, require_client_auth=True)
    port = raw.add_secure_port(f"{address}:0", tls)
    raw.start()
    endpoints = {RAW: f"{address}:{port}", **{name: server.endpoint for name, server in servers.items()}}
    print(json.dumps(endpoints), flush=True)
    sys.stdin.read()


def call(endpoints: dict[str, str], rounds: int, calls: int, credentials: Credentials) -> None:
    """The parties take turns."""
    parties: dict[str, Any] = {name: LpPipe(endpoints[name]) for name in _pools()}
    parties[RAW] = Raw(endpoints[RAW], credentials)
    for party in parties.values():
        latency_us(party, calls // 5)
    took: dict[str, list[float]] = {name: [] for name in parties}
    for _ in range(rounds):
        for name, party in parties.items():
            took[name].append(latency_us(party, calls))
    print(json.dumps(took), flush=True)


def _pools() -> dict[str, int]:
    """thread_pool_size of the server by party."""
    return {_INLINE: 0, _POOLED: 16}


def main() -> None:
    credentials = Credentials.from_bytes(base64.b64decode(sys.stdin.readline()))
    use_credentials(credentials)
    what, first, *numbers = sys.argv[1:]
    if what == "serve":
        serve(first, credentials)
    else:
        call(json.loads(first), *map(int, numbers), credentials)


if __name__ == "__main__":
    main()
