"""The snippets of docs/programs.md run as they are printed."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "programs.md").read_text(encoding="utf-8")
PRINTED = {
    "producers_consumer": r"328350\n",
    "map_reduce": r"\[\('be', 2\), \('not', 1\), \('or', 1\), \('to', 2\)\]\n",
    "parameter_server": r"\{'test_accuracy': 0\.9.* [0-9a-f]{64}\n",
    "evolution_strategies": r"(4[789]|50)\d\.\d+ [0-9a-f]{64}\n",
}


@pytest.mark.slow
@pytest.mark.parametrize("program", PRINTED)
def test_the_snippet_runs(program: str, tmp_path: Path) -> None:
    (snippet,) = re.findall(rf"^## {program}\n+```python\n(.*?)```", PAGE, re.DOTALL | re.MULTILINE)
    (tmp_path / "snippet.py").write_text(snippet)
    environment = {**os.environ, "LP_PIPE_RUNS": str(tmp_path / "runs")}
    done = subprocess.run(
        [sys.executable, "snippet.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(PRINTED[program], done.stdout)
