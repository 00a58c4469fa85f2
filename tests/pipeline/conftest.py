"""Pipelines in processes: their template does load torch, which every stage needs."""

import pytest


@pytest.fixture
def without_torch() -> None:
    """Let templates preload torch: otherwise each stage needs a second to load it."""


@pytest.fixture
def no_leaks(warm_template: None, no_leaks: None) -> None:
    """As for all tests, but with a template that was there before the test."""


@pytest.fixture(autouse=True)
def _fast_launches(warm_template: None) -> None:
    """Import torch once, and not at each launch."""
