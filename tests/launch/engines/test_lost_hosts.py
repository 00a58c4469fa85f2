"""Hosts that are cut off or killed in the middle of a training: pretend ones, reached by ssh."""

import itertools
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lp_pipe as lp
import lp_pipe.pipeline as pp
import lp_pipe.search as ls
from lp_pipe.checkpoint import Checkpoints
from lp_pipe.launch.engines import SshEngine
from tests.launch.engines import namespaces
from tests.waiting import until

pytestmark = [
    pytest.mark.multihost,
    pytest.mark.skipif(bool(namespaces.why_not()), reason=namespaces.why_not() or "there are hosts"),
]


@pytest.fixture
def hosts() -> Iterator[namespaces.Hosts]:
    made = namespaces.Hosts(3)
    yield made
    made.close()


class Feeder:
    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(step)
        return torch.randn(4, 6, generator=generator), torch.randn(4, 2, generator=generator)


def train(pipeline: Any, folder: Path) -> None:
    """Says when it is at the fifth step, and goes on when a host is lost."""
    for result in Checkpoints({"pipeline": pipeline}).steps(pipeline, 8, save_every=3):
        if result.step == 4:
            (folder / "reached").touch()
            until((folder / "go on").exists)
    (folder / "fingerprint").write_text(pipeline.fingerprint())
    lp.stop()


def program(folder: Path) -> lp.Program:
    layers: list[Any] = [pp.Layer(nn.Linear, 6, 8), pp.Layer(nn.Dropout, 0.5), pp.Layer(nn.Linear, 8, 2)]
    model = pp.Model(layers, torch.nn.functional.mse_loss, torch.optim.Adam)
    made = lp.Program("lost")
    with made.group("feeder", on_failure="restart"):
        feeder = made.add_node(lp.CourierNode(Feeder))
    pipeline = pp.add_pipeline(made, model, stages=[2], microbatches=2, inputs=feeder, on_failure="restart")
    made.add_node(lp.PyNode(train, pipeline, folder), label="trainer")
    return made


def undisturbed(folder: Path) -> str:
    folder.mkdir()
    (folder / "go on").touch()
    lp.launch(program(folder), "thread", run_dir=folder).wait(60)
    return (folder / "fingerprint").read_text()


@pytest.mark.parametrize("how", ["cut", "kill"])
def test_a_training_goes_on_without_a_lost_host_to_the_same_bits_and_nothing_runs_twice(
    how: str, hosts: namespaces.Hosts, shared: Path
) -> None:
    expected = undisturbed(shared / "whole")
    folder = shared / "lost"
    folder.mkdir()
    engine = SshEngine(",".join(hosts.names), ssh_config=hosts.ssh_config, python=hosts.python)
    run = lp.launch(program(folder), "multi_host", engine=engine, run_dir=folder)
    doomed = run._host.where("stages/1")
    assert run._host.where("trainer/0") != doomed
    until((folder / "reached").exists)
    lost = time.monotonic()
    getattr(hosts, how)(doomed)
    (folder / "go on").touch()
    until(lambda: run.status()["stages"][1]["restarts"] and run.status()["stages"][1]["state"] == "running")
    print(f"{how}: the stage runs again after {time.monotonic() - lost:.1f} s")
    if how == "cut":
        assert not hosts.pids(doomed)  # its nodes had ended before their successors began
        hosts.mend(doomed)
    run.wait(60)
    print(f"{how}: the training has ended after {time.monotonic() - lost:.1f} s")
    assert (folder / "fingerprint").read_text() == expected


class Epochs:
    """The state of a trial."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> int:
        return self.count

    def load_state_dict(self, count: int) -> None:
        self.count = count


def search(folder: Path) -> lp.Program:
    def trial(t: ls.Trial) -> None:
        epochs = Epochs()
        t.restore(epochs)
        for step in t.steps():
            if step == 3 and t.attempt == 1:
                (folder / f"trial {t.id} at {socket.gethostname()}").touch()
                until((folder / "go on").exists)
            epochs.count += 1
            t.report({"loss": t.params["x"] / step, "epochs": epochs.count}, checkpoint=epochs)

    searcher = ls.Random("loss", max_trials=4, max_steps=6)
    resources = lp.Resources(placement="spread")
    options: dict[str, Any] = {"slots": 2, "resources": resources, "folder": folder / "experiment"}
    return ls.experiment("searched", trial, space={"x": ls.uniform(0.0, 1.0)}, searcher=searcher, **options)


def test_a_search_loses_and_repeats_no_row_of_a_trial_whose_host_is_cut_off_and_comes_back(
    hosts: namespaces.Hosts, shared: Path
) -> None:
    engine = SshEngine(",".join(hosts.names), ssh_config=hosts.ssh_config, python=hosts.python)
    run = lp.launch(search(shared), "multi_host", engine=engine, run_dir=shared / "run")
    until(lambda: len(list(shared.glob("trial *"))) == 2)
    doomed = next(
        name for name in hosts.names if name not in (run._host.where("searcher/0"), run._host.where("slots/0"))
    )
    assert run._host.where("slots/1") == doomed
    hosts.cut(doomed)
    (shared / "go on").touch()
    until(lambda: any(one.attempts == 2 for one in ls.open(shared / "experiment").trials()), within_s=60)
    assert not hosts.pids(doomed)  # the old attempt had ended before the new one began
    hosts.mend(doomed)
    run.wait(60)
    rows = ls.open(shared / "experiment").rows()
    assert sorted((row.trial, row.step) for row in rows if row.name == "epochs") == [
        (trial, step) for trial in range(4) for step in range(1, 7)
    ]
    assert all(row.value == row.step for row in rows if row.name == "epochs")


def test_an_elastic_run_goes_on_without_a_host_that_is_cut_off_and_takes_it_back(
    hosts: namespaces.Hosts, shared: Path
) -> None:
    def make_program(num_hosts: int) -> lp.Program:
        made = lp.Program("elastic")
        with made.group("where"):
            for _ in range(num_hosts):
                made.add_node(lp.CourierNode(Where))
        return made

    engine = SshEngine(",".join(hosts.names), ssh_config=hosts.ssh_config, python=hosts.python)
    with lp.launch_elastic(make_program, "2:3", engine=engine, run_dir=shared) as run:
        assert everywhere(run) == ["h1", "h2", "h3"]
        lost = time.monotonic()
        hosts.cut("h2")
        until(lambda: run.num_hosts == 2)
        print(f"on two hosts after {time.monotonic() - lost:.1f} s")
        assert everywhere(run) == ["h1", "h3"]
        assert not hosts.pids("h2")  # nothing of the old program was left when the new one began
        hosts.mend("h2")
        mended = time.monotonic()
        until(lambda: len(run._hosts.up()) == 3, within_s=60)
        print(f"it is back after {time.monotonic() - mended:.1f} s")
        step = itertools.count()
        until(lambda: (shared / "checkpoints" / f"step-{next(step):08}").mkdir(parents=True) or run.num_hosts == 3)
        assert everywhere(run) == ["h1", "h2", "h3"]


class Where:
    def host(self) -> str:
        return socket.gethostname()


def everywhere(run: lp.ElasticRun) -> list[str]:
    return [run.run.client("where", index).host() for index in range(run.num_hosts)]
