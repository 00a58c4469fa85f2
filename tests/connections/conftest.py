"""Open carriers of any kind."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from lp_pipe.connections.credentials import Credentials
from tests.connections.carriers import Carrier, OpenCarrier


@pytest.fixture
def open_carrier(run_credentials: Credentials, socket_home: Path) -> Iterator[OpenCarrier]:
    with contextlib.ExitStack() as stack:

        def open_one(kind: str) -> Carrier:
            return stack.enter_context(contextlib.closing(Carrier(kind, socket_home)))

        yield open_one
