"""Every channel test runs over every transport."""

import shutil
import tempfile
from collections.abc import Iterator

import pytest

from lp_pipe.channels import sender
from tests.channels.edges import Edge


@pytest.fixture
def directory() -> Iterator[str]:
    """A short path: a unix socket's must stay below 108 bytes."""
    path = tempfile.mkdtemp(prefix="lp")
    yield path
    shutil.rmtree(path)


@pytest.fixture(params=["inproc", "shm", "shm by frames", "stream", "grpc", "tls", "gloo"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, run_credentials: object) -> str:
    kind, _, without_board = str(request.param).partition(" ")
    if without_board:
        monkeypatch.setattr(sender, "is_shm_queue_supported", False)
    return kind


@pytest.fixture
def edge(kind: str, directory: str) -> Iterator[Edge]:
    made = Edge(kind, directory)
    yield made
    made.hub.close("the test is over")
