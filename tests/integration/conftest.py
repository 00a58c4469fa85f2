"""Programs whose processes are forked from one template, which imports torch once."""

import pytest


@pytest.fixture
def no_leaks(warm_template: None, no_leaks: None) -> None:
    """As for all tests, but with a template that was there before the test."""


@pytest.fixture(autouse=True)
def _fast_launches(warm_template: None) -> None:
    """Import torch once, and not at each launch."""
