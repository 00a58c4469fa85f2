"""Helpers for tests of programs. The pytest plugin (plugin.py) offers them as fixtures, without an import."""

from lp_pipe.testing import faults as faults
from lp_pipe.testing.leaks import assert_no_leaks as assert_no_leaks
