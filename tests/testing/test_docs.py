"""The examples of docs/testing.md run as they are printed."""

import re
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

PAGE = Path(__file__).parents[2] / "docs" / "testing.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.slow
def test_every_example_passes(pytester: pytest.Pytester, no_leaks: None) -> None:
    pytester.makepyfile("\n".join(EXAMPLES))
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-p", "no:hypothesispytest", timeout=100)
    result.assert_outcomes(passed="\n".join(EXAMPLES).count("\ndef test_"))
