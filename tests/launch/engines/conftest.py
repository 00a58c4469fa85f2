"""Give tests two pretend hosts, and a folder that all hosts see."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.engines import namespaces
from tests.waiting import until


@pytest.fixture(scope="module")
def hosts() -> Iterator[namespaces.Hosts]:
    """Two hosts for all tests of a module, which leave no process there."""
    made = namespaces.Hosts(2)
    yield made
    try:
        until(lambda: not any(made.pids(name) for name in made.names), within_s=15)
    finally:
        made.close()


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that all hosts see; each has a /tmp of its own."""
    folder = Path(tempfile.mkdtemp(prefix="lp-shared-", dir="/run"))
    yield folder
    shutil.rmtree(folder)
