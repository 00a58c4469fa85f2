"""A server for CourierClients outside a program."""

from typing import Self

from lp_pipe.connections import port_tokens, tcp_endpoint
from lp_pipe.rpc.server import Server


class CourierServer:
    """Serves an object's public methods from construction until `stop`, without a program around it.

    endpoint: "grpc:HOST:PORT", or just "HOST:PORT", on the loopback of this host; port 0: any free one. Clients are
        processes of this user on this host: they find the server's token in a file that only this user can read.
        With "grpc:HOST:PORT#TOKEN" clients are all processes of this host that know the token.
    thread_pool_size: handlers run in so many threads; 0: in the thread that reads the connection.

    Raises:
        ValueError: it is no such endpoint.
        OSError: the port is in use.
    """

    def __init__(self, target: object, endpoint: str = "grpc:127.0.0.1:0", *, thread_pool_size: int = 16) -> None:
        where = tcp_endpoint.parse(tcp_endpoint.as_endpoint(endpoint))
        if where.is_secure:
            raise ValueError(f"CourierServer({endpoint!r}): outside a program only grpc:HOST:PORT can be served")
        token = where.token or port_tokens.new_token()
        self._server = Server(target, where._replace(token=token).with_token, thread_pool_size=thread_pool_size)
        self._where = tcp_endpoint.parse(self._server.endpoint)
        self._published = "" if where.token else token
        if self._published:
            try:
                port_tokens.publish(self._where.port, token)
            except BaseException:
                self._server.close()
                raise

    @property
    def address(self) -> str:
        """The string from which processes of this host make a client: "HOST:PORT", unless it has a token."""
        return self._where.target if self._published else self._where.with_token

    def stop(self, grace: float = 5.0) -> None:
        """Refuse new calls, give those in progress `grace` seconds, and close. Idempotent."""
        if self._published:
            port_tokens.withdraw(self._where.port, self._published)
        self._server.close(grace)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"CourierServer({self._where})"
