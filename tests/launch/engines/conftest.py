"""Give tests on pretend hosts a folder that all of them see."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that all hosts see; each has a /tmp of its own."""
    folder = Path(tempfile.mkdtemp(prefix="lp-shared-", dir="/run"))
    yield folder
    shutil.rmtree(folder)
