"""Helpers for tests of programs; as fixtures they come with the pytest plugin (plugin.py), which needs no import."""

from lp_pipe.testing import faults as faults
from lp_pipe.testing.leaks import assert_no_leaks as assert_no_leaks
