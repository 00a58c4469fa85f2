"""The addresses at which the ranks of a channel listen: one of the network by which both ends reach each other.

Between processes of one host that is the loopback. Between hosts it is the address of the node's servers in its run
(`--interface`), and outside of a run the one from which the other end is reached.
"""

from lp_pipe.connections import run_endpoints, tcp_endpoint
from lp_pipe.connections.routes import LOOPBACK, is_loopback, local_address_towards


def sender_address(endpoint: str) -> str:
    """Return this host's address for a sender to the hub at `endpoint`.

    Raises:
        OSError: there is no route to the hub's host.
    """
    run = ""
    if endpoint.startswith(run_endpoints.HOSTS):
        ways = run_endpoints.HostEndpoint.of(endpoint)
        if ways.is_same_host:
            return LOOPBACK
        run, endpoint = ways.run, ways.far_endpoint
    if not endpoint.startswith((tcp_endpoint.SECURE, tcp_endpoint.TLS)):
        return LOOPBACK
    return run_endpoints.listen_address(run) or local_address_towards(tcp_endpoint.parse(endpoint).host)


def receiver_address(endpoint: str, sender: str) -> str:
    """Return this host's address for the hub at `endpoint`. sender: the address at which its sender listens.

    Raises:
        OSError: there is no route to the sender's host.
    """
    if not sender or is_loopback(sender):
        return sender or LOOPBACK
    run = run_endpoints.split_name(endpoint)[0] if endpoint.startswith(run_endpoints.NAME) else ""
    return run_endpoints.listen_address(run) or local_address_towards(sender)
