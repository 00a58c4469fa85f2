"""The test that docs/reliability.md shows passes as it is printed."""

import re
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"


@pytest.mark.slow
def test_the_example_of_a_test_passes(pytester: pytest.Pytester, no_leaks: None) -> None:
    (example,) = re.findall(r"```python\n(import pytest\n.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    pytester.makepyfile(example)
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-p", "no:hypothesispytest", timeout=100)
    result.assert_outcomes(passed=1)
