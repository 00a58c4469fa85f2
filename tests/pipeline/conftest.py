"""Pipelines in processes: their template does load torch, which every stage needs."""

import pytest


@pytest.fixture
def without_torch() -> None:
    """In place of tests/conftest.py's: loading torch in each stage by itself would take a second of each."""
