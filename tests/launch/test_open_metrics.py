"""A run's states, calls and metrics are served as OpenMetrics text, on loopback only."""

import math
import urllib.error
import urllib.request

import pytest

import lp_pipe as lp
from lp_pipe.launch.edge_traffic import Traffic
from lp_pipe.launch.open_metrics import CONTENT_TYPE, open_metrics_text

WITHIN_S = 30


def test_the_text_has_every_family_with_escaped_labels() -> None:
    status = {"a": [{"state": "running", "restarts": 2}, {"state": "failed", "restarts": 0}]}
    traffic = [Traffic("a/0", "a/1", 3, 0, 70), Traffic("a/1", "a/0", 0, 4, 500)]
    metrics = {("a/0", 'odd "name"\n\\'): math.nan, ("a/0", "loss"): 0.25}
    assert open_metrics_text(status, traffic, metrics).splitlines() == [
        "# TYPE lp_pipe_node_up gauge",
        "# HELP lp_pipe_node_up Whether the node runs.",
        'lp_pipe_node_up{node="a/0"} 1.0',
        'lp_pipe_node_up{node="a/1"} 0.0',
        "# TYPE lp_pipe_restarts counter",
        "# HELP lp_pipe_restarts How often the node was restarted.",
        'lp_pipe_restarts_total{node="a/0"} 2.0',
        'lp_pipe_restarts_total{node="a/1"} 0.0',
        "# TYPE lp_pipe_calls counter",
        "# HELP lp_pipe_calls Calls from one node to another since the calling process started.",
        'lp_pipe_calls_total{user="a/0",server="a/1"} 3.0',
        "# TYPE lp_pipe_edge_bytes counter",
        "# HELP lp_pipe_edge_bytes Bytes of arguments and tensors that one node has sent to another since its process"
        " started.",
        'lp_pipe_edge_bytes_total{user="a/0",server="a/1"} 70.0',
        'lp_pipe_edge_bytes_total{user="a/1",server="a/0"} 500.0',
        "# TYPE lp_pipe_metric gauge",
        "# HELP lp_pipe_metric The last value that the node has logged under this name.",
        'lp_pipe_metric{name="loss",node="a/0"} 0.25',
        'lp_pipe_metric{name="odd \\"name\\"\\n\\\\",node="a/0"} NaN',
        "# EOF",
    ]


class Server:
    def __init__(self) -> None:
        lp.log_metrics({"loss": 0.5}, step=1)

    def add(self, value: int) -> int:
        return value + 1


def test_a_run_is_scraped_until_it_ends(mode: str, no_leaks: None) -> None:
    program = lp.Program("demo")
    program.add_node(lp.CourierNode(Server), label="server")
    with lp.launch(program, mode, metrics_port=0) as run:
        for _ in range(3):
            run.client("server").add(1)
        url = run.metrics_url
        assert url is not None and url.startswith("http://127.0.0.1:")
        with urllib.request.urlopen(url, timeout=WITHIN_S) as answer:
            assert answer.headers["Content-Type"] == CONTENT_TYPE
            lines = answer.read().decode().splitlines()
        assert 'lp_pipe_node_up{node="server/0"} 1.0' in lines
        assert 'lp_pipe_metric{name="loss",node="server/0"} 0.5' in lines
        assert 'lp_pipe_calls_total{user="launcher",server="server/0"} 3.0' in lines
        for request, status in ((url + "/x", 404), (urllib.request.Request(url, headers={"Host": "evil.com"}), 403)):
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(request, timeout=WITHIN_S)
            assert refused.value.code == status
            refused.value.close()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(url, timeout=WITHIN_S)
