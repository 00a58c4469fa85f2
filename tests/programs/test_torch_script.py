"""Scripts for torchrun, unchanged, as the ranks of a program."""

import json
import re
from pathlib import Path

import pytest

import lp_pipe as lp
from lp_pipe.programs.torch_script import Rank, Script, make_program
from tests.cli.commands import Command
from tests.cli.conftest import brief_command as brief_command
from tests.cli.conftest import command as command
from tests.cli.conftest import command_server as command_server
from tests.cli.conftest import folder as folder

DDP = """
import os, pickle, sys
import torch, torch.distributed as dist
import beside_it

class Mine: ...

def main():
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    model(torch.full((2, 4), float(dist.get_rank()))).sum().backward()
    assert type(pickle.loads(pickle.dumps(Mine()))) is Mine
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "OMP_NUM_THREADS")
    print("saw", *[os.environ[name] for name in names], model.module.weight.grad[0, 0].item(), sys.argv[1:])
    dist.destroy_process_group()

if __name__ == "__main__":
    main()
"""
FAILS = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(print("rank", os.environ["RANK"], "was told to end")))
if os.environ["RANK"] == "1":
    while not os.path.exists("rank 0 is up"):
        time.sleep(0.01)
    raise ValueError("bad data")
open("rank 0 is up", "w").close()
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("options", "places"),
    [(["--nproc=2"], ["0 2 0 2 0", "1 2 1 2 0"]), (["--nproc=1", "--mode=multi_host"], ["0 2 0 1 0", "1 2 0 1 1"])],
)
def test_an_unchanged_ddp_script_trains_on_one_host_and_on_two(
    command: Command, folder: Path, options: list[str], places: list[str]
) -> None:
    (folder / "ddp.py").write_text(DDP)
    (folder / "beside_it.py").write_text("")
    done = command("launch", *options, "ddp.py", "--run-dir=run", "--", "--epochs=3")
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(re.findall("saw (.*)", done.stdout)) == [f"{place} 1 1.0 ['--epochs=3']" for place in places]


def test_a_rank_that_fails_is_the_failure_and_the_others_get_sigterm_at_once(command: Command, folder: Path) -> None:
    (folder / "fails.py").write_text(FAILS)
    done = command("launch", "--nproc=2", "fails.py", "--run-dir=run", "--grace=30")
    assert done.returncode == 1
    assert re.search(r"node rank/1 .*failed: ValueError: bad data\n  fails.py:7 in <module>", done.stderr)
    assert "[rank/0] rank 0 was told to end" in done.stdout


def test_wrong_usage_is_said_before_anything_starts(brief_command: Command, folder: Path) -> None:
    (folder / "ddp.py").write_text("def main():\n    init_process_group('gloo')\n")
    (folder / "broken.py").write_text("def")
    for arguments, said in {
        ("--nproc=0", "ddp.py"): "--nproc=0",
        ("--nproc=2", "--mode=thread", "ddp.py"): "--mode=thread",
        ("--nproc=2", "ddp.py:main"): ":main",
        ("--nproc=2", "dpd.py"): "ddp.py",
        ("ddp.py",): "lp_pipe launch --nproc=2 ddp.py",
    }.items():
        done = brief_command("launch", *arguments)
        assert (done.returncode, done.stdout) == (2, "") and said in done.stderr
    done = brief_command("launch", "--nproc=2", "broken.py")
    assert done.returncode == 3 and "SyntaxError" in done.stderr


def test_a_module_is_a_script_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package/train.py").write_text(
        "import json, os, sys\n"
        "open(f\"seen{os.environ['RANK']}\", 'w').write(json.dumps([__name__, __package__, sys.argv[1:]]))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    program = make_program(Script(("--x",), module="package.train"), num_per_host=2)
    lp.launch(program, mode="process", run_dir=tmp_path / "run").wait(60)
    assert [json.loads((tmp_path / f"seen{rank}").read_text()) for rank in range(2)] == [
        ["__main__", "package", ["--x"]]
    ] * 2


def test_ranks_are_numbered_host_by_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    program = make_program(Script((), module="train"), num_per_host=2, num_hosts=3)
    assert list(program.groups) == ["rank"] and len(program.groups["rank"]) == 6
    found = Rank(5, num_per_host=2, num_hosts=3).environment("[::1]:4711", "mine")
    assert {name: found[name] for name in ("RANK", "LOCAL_RANK", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")} == {
        "RANK": "5",
        "LOCAL_RANK": "1",
        "GROUP_RANK": "2",
        "MASTER_ADDR": "::1",
        "MASTER_PORT": "4711",
    }
