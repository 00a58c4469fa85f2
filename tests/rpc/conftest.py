"""Programs whose processes are forked from one template."""

import pytest


@pytest.fixture
def no_leaks(warm_bare_template: None, no_leaks: None) -> None:
    """As for all tests, but with a template that was there before the test."""
