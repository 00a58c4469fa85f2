"""`lp_pipe checkpoint` and `lp_pipe launch --resume`, as users run them."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import lp_pipe.pipeline as pp
from lp_pipe.cli.main import main
from tests.cli.commands import Command
from tests.pipeline.plain_loop import launched, random_batches

TRAIN = """
import sys
import torch
from torch import nn
import lp_pipe as lp
import lp_pipe.pipeline as pp
from lp_pipe.checkpoint import Checkpoints


class Feeder:
    def batch(self, step):
        generator = torch.Generator().manual_seed(step)
        return torch.randn(4, 3, generator=generator), torch.randn(4, 2, generator=generator)


def loss(output, target):
    return ((output - target) ** 2).mean()


def train(pipeline):
    checkpoints = Checkpoints({"pipeline": pipeline})
    restored = checkpoints.restore()
    print("restored", restored and restored.step, flush=True)
    for result in pipeline.steps(6 - pipeline.current_step()):
        if result.step % 2 == 1:
            checkpoints.save(result.step + 1, wait=False)
        if result.step == 4 and restored is None:
            raise RuntimeError("died on the way")
    checkpoints.wait_until_written()
    print("sha256", pipeline.fingerprint(), flush=True)
    lp.stop()


def make_program():
    program = lp.Program("resumable")
    feeder = program.add_node(lp.CourierNode(Feeder), label="feeder")
    layers = [pp.Layer(nn.Linear, 3, 4), pp.Layer(nn.Dropout, 0.5), pp.Layer(nn.Linear, 4, 2)]
    model = pp.Model(layers, loss, torch.optim.Adam)
    pipeline = pp.add_pipeline(program, model, stages=2, microbatches=2, inputs=feeder)
    program.add_node(lp.PyNode(train, pipeline), label="trainer")
    return program
"""


def test_a_run_that_died_is_resumed_in_its_folder_and_ends_with_the_same_bits(
    command: Command, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = TRAIN.replace("result.step == 4 and restored is None", "False")
    (folder / "whole.py").write_text(whole)
    (folder / "train.py").write_text(TRAIN)
    assert main(["launch", "whole.py", "--mode=thread", "--run-dir=undisturbed"]) == 0
    sha = next(line for line in capsys.readouterr().out.splitlines() if "sha256" in line).split()[-1]

    assert main(["launch", "train.py", "--mode=thread", "--run-dir=runs/mine"]) == 1
    capsys.readouterr()
    assert main(["checkpoint", "ls", "runs/mine"]) == 0
    steps = [line.split()[:2] for line in capsys.readouterr().out.splitlines()[1:]]
    assert steps == [["step-00000002", "2"], ["step-00000004", "4"]]

    resumed = command("launch", "train.py", "--mode=process", "--resume=mine")
    assert resumed.returncode == 0, resumed.stderr
    assert "restored 4" in resumed.stdout
    assert "no checkpoint" not in resumed.stdout + resumed.stderr
    assert sha in resumed.stdout
    lines = [json.loads(line) for line in (folder / "runs/mine/metrics.jsonl").read_text().splitlines()]
    (mark,) = [line for line in lines if "event" in line]
    assert (mark["node"], mark["event"], mark["step"]) == ("trainer/0", "resumed", 4)
    events = [json.loads(line) for line in (folder / "runs/mine/events.jsonl").read_text().splitlines()]
    assert [(one["node"], one["step"]) for one in events if one["event"] == "resumed"] == [("trainer/0", 4)]

    assert main(["checkpoint", "verify", "runs/mine"]) == 0
    assert capsys.readouterr().out.count(": unchanged ") == 3
    share = next((folder / "runs/mine/checkpoints/step-00000006/pipeline").glob("*.distcp"))
    data = bytearray(share.read_bytes())
    data[len(data) // 2] ^= 1
    share.write_bytes(data)
    assert main(["checkpoint", "verify", "runs/mine", "--json"]) == 1
    reports = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [bool(report["damage"]) for report in reports] == [False, False, True]
    assert share.name in reports[2]["damage"][0]

    assert main(["checkpoint", "export", "runs/mine/checkpoints/step-00000004", "-o", "model.safetensors"]) == 0
    assert (folder / "model.safetensors").stat().st_size > 100


def test_a_run_whose_folder_was_moved_is_resumed_where_it_is(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Regression: the run began again at step 0, in a new folder at the old place."""
    (folder / "train.py").write_text(TRAIN)
    assert main(["launch", "train.py", "--mode=thread", "--run-dir=runs/mine"]) == 1
    (folder / "runs/mine").rename(folder / "kept")
    assert main(["launch", "train.py", "--mode=thread", "--resume=kept"]) == 0
    assert "restored 4" in capsys.readouterr().out
    assert (folder / "kept/checkpoints/step-00000006").is_dir()
    assert not (folder / "runs/mine").exists()


def test_a_resumed_run_without_a_checkpoint_says_that_it_begins_anew(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "train.py").write_text(TRAIN.replace("result.step == 4 and", "result.step == 0 and"))
    assert main(["launch", "train.py", "--mode=thread", "--run-dir=runs/mine"]) == 1
    said = capsys.readouterr()
    assert "no checkpoint" not in said.out + said.err
    main(["launch", "train.py", "--mode=thread", "--resume=mine"])
    said = capsys.readouterr()
    assert "starting at step 0" in said.out + said.err

    main(["launch", "train.py", "--mode=thread", "--resume=mine", "--json"])
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert next(event["text"] for event in events if event["event"] == "note").startswith("starting at step 0")


def test_what_a_pipeline_has_saved_by_itself_is_listed_verified_and_exported(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = pp.Model([nn.Linear(8, 4), nn.Linear(4, 2)], nn.functional.mse_loss, torch.optim.Adam)
    with launched("thread", model, random_batches([4]), stages=2, microbatches=2) as pipeline:
        pipeline.save(folder / "saved")
    for path in ("saved", "."):
        assert main(["checkpoint", "ls", path]) == 0
        assert capsys.readouterr().out.splitlines()[1].split()[:2] == ["saved", "0"]
    assert main(["checkpoint", "verify", "saved"]) == 0
    assert ": unchanged " in capsys.readouterr().out
    assert main(["checkpoint", "export", "saved", "-o", "model.safetensors"]) == 0
    assert "4 tensors" in capsys.readouterr().out

    share = sorted((folder / "saved").glob("*.distcp"))[1]
    share.write_bytes(share.read_bytes()[:-100])
    assert main(["checkpoint", "verify", "saved"]) == 1
    assert share.name in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--resume=runs/gone", "--run-dir=other"], "leave --run-dir out"),
        (["--resume=yours"], "no run 'yours'"),
    ],
)
def test_a_run_that_cannot_be_resumed_is_named(
    folder: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "empty.py").write_text("import lp_pipe as lp\nprogram = lp.Program('empty')\n")
    assert main(["launch", "empty.py", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_damaged_checkpoint_is_listed_in_json_too(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Regression: the list in JSON left the damaged checkpoint out."""
    for step in (4, 6):
        saved = folder / "checkpoints" / f"step-{step:08}"
        saved.mkdir(parents=True)
        (saved / "manifest.json").write_text("{")
    assert main(["checkpoint", "ls", "--json"]) == 0
    listed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [Path(one["path"]).name for one in listed] == ["step-00000004", "step-00000006"]
    assert all(len(one["damage"]) == 1 for one in listed)


def test_where_there_is_no_checkpoint_the_command_says_so(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in ((["ls"], "has no finished checkpoint"), (["verify", "nowhere"], "nowhere ")):
        assert main(["checkpoint", *arguments]) == 2
        assert message in capsys.readouterr().err
    (folder / "step-00000001").mkdir()
    assert main(["checkpoint", "verify", "step-00000001"]) == 1
    assert "is no finished checkpoint" in capsys.readouterr().out
