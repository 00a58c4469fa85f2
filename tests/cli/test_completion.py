"""Shells complete commands, options, live runs and their nodes, without starting Python."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from lp_pipe.cli.completion import script_for


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """Make a live run "train-1" and a dead one "train-2", as their launchers write it, and an ended one in runs/."""
    for number, pid in ((1, os.getpid()), (2, 2**22 + 1)):
        folder = tmp_path / f"train-{number}"
        folder.mkdir()
        nodes = {"nodes": [{"name": f"trainer/{number}"}, {"name": "server/0"}]}
        (folder / "graph.json").write_text(json.dumps(nodes, indent=2))
        live = tmp_path / "state" / "lp_pipe" / "live" / f"{number}.json"
        live.parent.mkdir(parents=True, exist_ok=True)
        live.write_text(json.dumps({"program": "train", "run_dir": str(folder), "pid": pid, "end": 0}, indent=1))
    ended = tmp_path / "runs" / "old"
    ended.mkdir(parents=True)
    (ended / "run.json").write_text("{}")
    return tmp_path / "state"


def answer(state: Path, *command: str) -> list[str]:
    environment = {**os.environ, "XDG_STATE_HOME": str(state), "HOME": str(state)}
    done = subprocess.run(command, cwd=state.parent, env=environment, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


TRY = """
source {script}
COMP_WORDS=({words} ''); COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 )); COMP_WORDS[COMP_CWORD]={last!r}
_shtab_lp_pipe
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.mark.parametrize(
    ("words", "last", "expected"),
    [
        ("lp_pipe", "compl", ["completion"]),
        ("lp_pipe launch", "--metrics", ["--metrics-port"]),
        ("lp_pipe completion", "", ["bash", "zsh", "fish"]),
        ("lp_pipe stop", "", ["old", "train-1"]),
        ("lp_pipe stop", "tr", ["train-1"]),
        ("lp_pipe attach train-1", "train", ["train-1", "trainer/1"]),
        ("lp_pipe stop", "./train-", ["./train-1", "./train-2"]),
    ],
)
def test_bash_completes(words: str, last: str, expected: list[str], state: Path) -> None:
    script = state.parent / "completion.bash"
    script.write_text(script_for("bash"))
    found = answer(state, "bash", "-c", TRY.format(script=script, words=words, last=last))
    assert sorted(set(found)) == sorted(expected)


@pytest.mark.skipif(shutil.which("fish") is None, reason="needs fish")
def test_fish_completes(state: Path) -> None:
    script = state.parent / "completion.fish"
    script.write_text(script_for("fish"))
    found = answer(state, "fish", "-c", "source completion.fish; complete -C 'lp_pipe stop tr'")
    assert found[0] == "train-1" and "train-2" not in found  # the rest describes it


@pytest.mark.skipif(shutil.which("zsh") is None, reason="needs zsh")
def test_zsh_takes_the_script_and_finds_runs(state: Path) -> None:
    script = state.parent / "_lp_pipe"
    script.write_text(script_for("zsh"))
    functions = "compdef() { : }; source ./_lp_pipe >/dev/null 2>&1; emulate sh; __lp_pipe_run_names"
    assert answer(state, "zsh", "-fc", functions) == ["old", "train-1"]
