"""Replicas in processes: their template does load torch, which every worker needs."""

import pytest


@pytest.fixture
def without_torch() -> None:
    """Let templates preload torch: otherwise each stage needs a second to load it."""
