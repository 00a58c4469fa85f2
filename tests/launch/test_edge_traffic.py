"""Calls are counted by the edge that they go along."""

import time
from typing import Any

import numpy as np

import lp_pipe as lp
from lp_pipe.launch.edge_traffic import Traffic, traffic_of

WITHIN_S = 30


class Echo:
    def echo(self, value: Any) -> Any:
        return value


def call(server: Any) -> None:
    for _ in range(10):
        server.echo(np.zeros(1000))
    lp.wait_for_stop()


def test_calls_and_their_bytes_are_counted_by_edge(mode: str) -> None:
    program = lp.Program("demo")
    server = program.add_node(lp.CourierNode(Echo), label="server")
    program.add_node(lp.PyNode(call, server), label="user")
    with lp.launch(program, mode) as run:
        run.client("server").echo(1)
        deadline = time.monotonic() + WITHIN_S
        edges: dict[str, Traffic] = {}
        while edges.get("user/0", Traffic("", "", 0, 0, 0)).calls < 10 and time.monotonic() < deadline:
            edges = {one.user: one for one in traffic_of(run._hangs.views(), run._coordinator.plan.owners)}
            time.sleep(0.02)
        assert edges["user/0"].server == "server/0" and edges["user/0"].calls == 10
        assert 80_000 < edges["user/0"].bytes_sent < 90_000
        assert edges["launcher"].calls == 1
