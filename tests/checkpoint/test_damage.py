"""Every damage to any file of a checkpoint with a pipeline, a node's state and a manifest is found, and named."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import lp_pipe as lp
import lp_pipe.pipeline as pp
from lp_pipe.checkpoint import Checkpoints, open_checkpoint
from lp_pipe.cli.main import main
from lp_pipe.errors import CheckpointError


class Counter:
    """A node that takes part by two methods."""

    def __init__(self) -> None:
        self.state = {"value": 7}

    def state_dict(self) -> dict[str, int]:
        return self.state

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.state = state


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a checkpoint of two stages with an optimizer, and of a node."""
    model = pp.Model(
        [pp.Layer(torch.nn.Linear, 6, 4), pp.Layer(torch.nn.Linear, 4, 2)],
        torch.nn.functional.mse_loss,
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    )
    program = lp.Program("damaged")
    pipeline = pp.add_pipeline(program, model, stages=2, microbatches=2)
    counter = program.add_node(lp.CourierNode(Counter), label="counter")
    folder = tmp_path_factory.mktemp("checkpoints")
    with lp.launch(program, "thread") as run:
        client = run.client(pipeline)
        client.step((torch.ones(4, 6), torch.ones(4, 2)))
        Checkpoints({"pipeline": client, "counter": run.client(counter)}, folder).save(1)
    return folder / "step-00000001"


def files_of(checkpoint: Path) -> list[Path]:
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file())
    assert len(files) == 5  # a share of each stage and their manifest, the node's state, the manifest of all
    return files


@pytest.fixture
def restoring(checkpoint: Path) -> Iterator[None]:
    """Restore after the test what it has damaged."""
    before = {path: path.read_bytes() for path in files_of(checkpoint)}
    yield
    for path, data in before.items():
        path.write_bytes(data)
    assert not damage(checkpoint)


def damage(checkpoint: Path) -> list[str]:
    """Return the damage as restoring and verifying find it."""
    try:
        return open_checkpoint(checkpoint).damage()
    except CheckpointError as error:
        return [str(error)]


def assert_is_named(checkpoint: Path, path: Path, what: str) -> None:
    (found,) = damage(checkpoint)
    assert path.name in found, f"{what} of {path}: {found}"


@pytest.mark.usefixtures("restoring")
def test_every_file_that_is_torn_anywhere_is_found(checkpoint: Path) -> None:
    for path in files_of(checkpoint):
        data = path.read_bytes()
        for length in {0, 1, len(data) // 2, *range(0, len(data), max(1, len(data) // 50)), len(data) - 1}:
            path.write_bytes(data[:length])
            if path.name == "manifest.json" and data[:length] + b"\n" == data:
                continue  # only the line's end is missing: nothing is lost
            assert_is_named(checkpoint, path, f"the first {length} bytes")
        path.write_bytes(data)


@pytest.mark.usefixtures("restoring")
def test_flipped_bits_in_every_file_are_found(checkpoint: Path) -> None:
    """Flip all bits of small files, and some of each kind in large ones: a checksum does not depend on their places."""
    for path in files_of(checkpoint):
        data = path.read_bytes()
        for bit in range(0, 8 * len(data), max(1, 8 * len(data) // 400) | 1):
            changed = bytearray(data)
            changed[bit // 8] ^= 1 << bit % 8
            path.write_bytes(changed)
            assert_is_named(checkpoint, path, f"bit {bit}")
        path.write_bytes(data)


@pytest.mark.usefixtures("restoring")
def test_verify_names_each_file_on_the_command_line(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "verify", str(checkpoint)]) == 0
    for path in files_of(checkpoint):
        data = path.read_bytes()
        path.write_bytes(data[:-2] + bytes([data[-2] ^ 1]) + data[-1:])
        capsys.readouterr()
        assert main(["checkpoint", "verify", str(checkpoint)]) == 1
        assert path.name in capsys.readouterr().out
        path.write_bytes(data)
