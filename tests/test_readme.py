"""The snippets of the README and of the docs run as they are printed."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lp_pipe import errors

ROOT = Path(__file__).parent.parent


def blocks_of(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)


BLOCKS = blocks_of("README.md")


def run(*command: str, cwd: Path) -> str:
    environment = {**os.environ, "LP_PIPE_RUNS": str(cwd / "runs")}
    done = subprocess.run(
        [sys.executable, *command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_thirty_lines_give_the_same_parameters_in_every_mode(tmp_path: Path) -> None:
    fingerprints = set()
    for mode in ("process", "thread"):
        (tmp_path / f"{mode}.py").write_text(BLOCKS[0].replace('mode="process"', f'mode="{mode}"'))
        fingerprints |= set(re.findall(r"parameters ([0-9a-f]{16})", run(f"{mode}.py", cwd=tmp_path)))
    assert len(fingerprints) == 1


def test_the_unit_test_is_a_unit_test(tmp_path: Path) -> None:
    (tmp_path / "test_adder.py").write_text(BLOCKS[1])
    assert "1 passed" in run("-m", "pytest", "-q", "-p", "no:cacheprovider", "test_adder.py", cwd=tmp_path)


@pytest.mark.parametrize("mode", ["process", "thread"])
def test_the_page_on_nodes_runs(mode: str, tmp_path: Path) -> None:
    (block,) = blocks_of("docs/nodes.md")
    (tmp_path / "page.py").write_text(block.replace('mode="process"', f'mode="{mode}"'))
    run("page.py", cwd=tmp_path)


@pytest.mark.parametrize("mode", ["process", "thread"])
def test_the_ported_launchpad_program_runs(mode: str, tmp_path: Path) -> None:
    (block,) = blocks_of("docs/coming_from_launchpad.md")
    (tmp_path / "ported.py").write_text(block.replace('mode="process"', f'mode="{mode}"'))
    run("ported.py", cwd=tmp_path)


def test_the_page_on_metrics_runs(tmp_path: Path) -> None:
    (block,) = blocks_of("docs/metrics.md")
    (tmp_path / "page.py").write_text(block)
    assert "trainer/0 {'loss': 0.01}" in run("page.py", cwd=tmp_path)


def test_the_page_on_watching_runs(tmp_path: Path) -> None:
    (block,) = blocks_of("docs/watching.md")
    (tmp_path / "page.py").write_text(block)
    assert "trainer/0 3 {'loss': 0.33" in run("page.py", cwd=tmp_path)


def test_the_page_on_agents_runs(tmp_path: Path) -> None:
    (block,) = blocks_of("docs/agents.md")
    (tmp_path / "page.py").write_text(block)
    assert "'samples': 160" in run("page.py", cwd=tmp_path)


def test_the_page_on_search_runs(tmp_path: Path) -> None:
    (block,) = blocks_of("docs/search.md")
    (tmp_path / "page.py").write_text(block)
    assert "checkpoints" in run("page.py", cwd=tmp_path)


@pytest.mark.slow
def test_the_program_for_those_who_come_from_torch_runs(tmp_path: Path) -> None:
    block, _ = blocks_of("docs/coming_from_torch.md")
    (tmp_path / "page.py").write_text(block)
    assert "after 16 steps" in run("page.py", cwd=tmp_path)


@pytest.mark.slow
def test_the_process_group_for_those_who_come_from_torch_runs(tmp_path: Path) -> None:
    _, block = blocks_of("docs/coming_from_torch.md")
    (tmp_path / "page.py").write_text(block)
    printed = run("page.py", cwd=tmp_path)
    assert "rank 0: [[3.0, 3.0, 3.0, 3.0]]" in printed and "rank 1: [[3.0, 3.0, 3.0, 3.0]]" in printed


def test_the_page_on_what_fails_has_every_error() -> None:
    page = (ROOT / "docs/hangs.md").read_text(encoding="utf-8")
    named = [name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)]
    assert len(named) > 10 and [name for name in named if f"`{name}`" not in page and f".{name}`" not in page] == []


def test_the_page_on_data_parallelism_has_one_result(tmp_path: Path) -> None:
    (block,) = blocks_of("docs/data_parallel.md")
    found = set()
    for workers in (1, 3):
        script = block.replace("workers=2", f"workers={workers}").replace('mode="process"', 'mode="thread"')
        (tmp_path / "page.py").write_text(script)
        found |= set(re.findall(rf"by {workers} workers: (\S+)", run("page.py", cwd=tmp_path)))
    assert len(found) == 1


def test_the_page_on_partitioning_runs_and_its_numbers_are_right(tmp_path: Path) -> None:
    page = "docs/partitioning.md"
    (block,) = blocks_of(page)
    (tmp_path / "partitioned.py").write_text(block)
    printed = run("partitioned.py", cwd=tmp_path)
    text = (ROOT / page).read_text(encoding="utf-8")
    for number in ("3.1 ms", "3.87 times as fast as one device", "6.15 ms", "6 ms"):
        assert number in printed and number in text


@pytest.mark.slow
def test_the_page_on_pipelines_runs(tmp_path: Path) -> None:
    train, *others = blocks_of("docs/pipeline.md")
    (tmp_path / "page.py").write_text("\n".join([train.replace("range(100)", "range(2)"), *others]))
    assert "equal: the pipeline and the plain loop" in run("page.py", cwd=tmp_path)
    assert (tmp_path / "checkpoint" / ".metadata").exists()


def test_every_relative_link_leads_somewhere() -> None:
    for page in [ROOT / "README.md", ROOT / "BUILD.md", *(ROOT / "docs").rglob("*.md")]:
        for link in re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8")):
            assert "://" in link or (page.parent / link).exists(), f"{page.name} links to {link}"


@pytest.mark.slow
def test_the_training_on_the_page_on_data_is_resumed_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    (block,) = blocks_of("docs/data.md")
    (tmp_path / "whole.py").write_text(block)
    (tmp_path / "begun.py").write_text(block.replace("steps(pipeline, 1000,", "steps(pipeline, 10,"))  # of 7 an epoch
    whole = run("-m", "lp_pipe", "launch", "whole.py", "--run-dir=whole", cwd=tmp_path)
    begun = run("-m", "lp_pipe", "launch", "begun.py", "--run-dir=begun", cwd=tmp_path)
    resumed = run("-m", "lp_pipe", "launch", "whole.py", "--resume=begun", cwd=tmp_path)
    assert "10 steps" in begun
    found = [re.findall(r"21 steps, parameters ([0-9a-f]{64})", output) for output in (whole, resumed)]
    assert found[0] == found[1] != []
