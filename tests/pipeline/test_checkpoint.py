"""Checkpoints: any number of stages writes them, any number goes on from them, to the bit."""

import functools
import pickle
import re
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import format_utils

import lp_pipe as lp
import lp_pipe.pipeline as pp
from lp_pipe.checkpoint import host_visibility
from lp_pipe.errors import CheckpointError
from lp_pipe.pipeline.conductor.workers import Workers
from lp_pipe.pipeline.layers.model import OptimizerFactory
from lp_pipe.pipeline.layers.wrapper import unwrapped
from lp_pipe.pipeline.protocol import (
    AdoptCheckpoint,
    Command,
    GetState,
    GetStateNames,
    HoldShare,
    PlanShare,
    ReadCheckpoint,
    RemoveShare,
    WriteShare,
)
from lp_pipe.pipeline.worker.shares import Shares
from tests.checkpoint import disks
from tests.pipeline.plain_loop import (
    D,
    PlainLoop,
    adam,
    assert_same_state,
    launched,
    launched_many,
    model_with_everything,
    random_batches,
    sgd,
    squared_error,
)

pytestmark = [
    pytest.mark.usefixtures("no_leaks"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]

needs_disks = pytest.mark.skipif(bool(disks.why_not()), reason=disks.why_not() or "there are disks")

BATCHES = random_batches([6, 6, 5, 7, 6, 6])


def test_another_number_of_stages_goes_on_where_the_first_one_was(tmp_path: Path) -> None:
    model = model_with_everything()
    with launched("thread", model, BATCHES, stages=3, microbatches=4) as pipeline:
        list(pipeline.steps(3))
        pipeline.save(tmp_path)
    with launched("thread", model, BATCHES, stages=2, microbatches=4) as pipeline:
        pipeline.load(tmp_path)
        assert [result.step for result in pipeline.steps()] == [3, 4, 5]
        resumed = pipeline.state_dict()

    plain = PlainLoop(model, 4)
    plain.steps(BATCHES)
    assert_same_state(resumed, plain.state_dict())


SCHEDULERS: dict[str, Any] = {
    "none": None,
    "multistep": lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4], 0.5),
    "cosine": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5),
    "lambda": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "numpy": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: np.cos(step / 7)),
    "one cycle": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10),
    "sequential": lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=2),
            torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8),
        ],
        [2],
    ),
}
OPTIMIZERS: dict[str, Any] = {
    "sgd": sgd,
    "adam": adam,
    "groups": lambda parameters: torch.optim.AdamW(
        [
            {"params": [p for _, p in parameters if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for _, p in parameters if p.dim() <= 1], "weight_decay": 0.0, "lr": 0.01},
        ],
        lr=0.02,
        amsgrad=True,
    ),
}
CUTS: dict[str, dict[str, Any]] = {
    "one": {"stages": 1},
    "four": {"stages": 4, "schedule": "gpipe"},
    "chunks": {"stages": 2, "schedule": "interleaved", "chunks": 2},
    "v": {"stages": 2, "schedule": "zbv"},
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_optimizer_and_scheduler_go_on_whatever_they_are(tmp_path: Path, scheduler: str, optimizer: str) -> None:
    model = model_with_everything(optimizer=OPTIMIZERS[optimizer], lr_scheduler=SCHEDULERS[scheduler])
    plain = PlainLoop(model, 2)
    plain.steps(BATCHES)
    with launched("thread", model, BATCHES, microbatches=2, **CUTS["chunks"]) as pipeline:
        list(pipeline.steps(3))
        pipeline.save(tmp_path)
    for options in (CUTS["four"], CUTS["one"], CUTS["v"]):
        with launched("thread", model, BATCHES, microbatches=2, **options) as pipeline:
            pipeline.load(tmp_path)
            list(pipeline.steps())
            assert_same_state(pipeline.state_dict(), plain.state_dict())


@pytest.mark.slow
def test_processes_write_and_read_the_same_checkpoints(tmp_path: Path) -> None:
    model = model_with_everything()
    plain = PlainLoop(model, 4, clip_grad_norm=0.5)
    plain.steps(BATCHES)
    options = {"microbatches": 4, "clip_grad_norm": 0.5}
    pipelines = [(model, BATCHES, {"stages": stages, **options}) for stages in (3, 2)]
    with launched_many("process", pipelines) as (three, two):
        list(three.steps(2))
        three.save(tmp_path / "two")
        two.load(tmp_path / "two")
        list(two.steps(2))
        two.save(str(tmp_path / "four"))
        fingerprint = two.fingerprint()
        list(two.steps())
        assert_same_state(two.state_dict(), plain.state_dict())
        three.load(tmp_path / "four")
        assert (three.current_step(), three.fingerprint()) == (4, fingerprint)
    with launched("thread", model, BATCHES, stages=1, **options) as one:
        one.load(tmp_path / "four")
        assert one.fingerprint() == fingerprint
        list(one.steps())
        assert_same_state(one.state_dict(), plain.state_dict())


def test_loading_a_checkpoint_from_before_the_first_step_forgets_the_momentum(tmp_path: Path) -> None:
    """Regression: such a checkpoint has no optimizer state, so the pipeline went on with its own."""
    model = model_with_everything(optimizer=sgd)
    with launched("thread", model, BATCHES, microbatches=2) as pipeline:
        pipeline.save(tmp_path)
        list(pipeline.steps())
        trained = pipeline.fingerprint()
        pipeline.load(tmp_path)
        assert pipeline.current_step() == 0
        list(pipeline.steps())
        assert pipeline.fingerprint() == trained


@pytest.mark.parametrize("keeps", ["all parameters", "trainable parameters"])
def test_frozen_layers_may_be_cut_in_another_way(tmp_path: Path, keeps: str) -> None:
    """A stage with frozen parameters only has no optimizer: factories that leave these out would give torch nothing."""

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return sgd([p for _, p in parameters if p.requires_grad or keeps == "all parameters"])

    frozen = nn.Linear(D, D).requires_grad_(False)
    model = pp.Model([frozen, nn.Linear(D, D), nn.Linear(D, D)], squared_error, optimizer)
    plain = PlainLoop(model, 2)
    plain.steps(BATCHES)
    with launched("thread", model, BATCHES, stages=[1, 2], microbatches=2) as pipeline:
        list(pipeline.steps(2))
        pipeline.save(tmp_path)
    for stages in ([2], 1):
        with launched("thread", model, BATCHES, stages=stages, microbatches=2) as pipeline:
            pipeline.load(tmp_path)
            list(pipeline.steps())
            assert_same_state(pipeline.state_dict(), plain.state_dict())


def test_plain_torch_reads_the_folder_as_a_distributed_checkpoint(tmp_path: Path) -> None:
    model = model_with_everything()
    with launched("thread", model, BATCHES, stages=2) as pipeline:
        list(pipeline.steps(1))
        pipeline.save(tmp_path / "folder")
        state = pipeline.state_dict()
    found = {"model": {name: torch.empty_like(value) for name, value in state.items()}}
    dcp.load(found, checkpoint_id=tmp_path / "folder", no_dist=True)
    assert_same_state(found["model"], state)

    format_utils.dcp_to_torch_save(tmp_path / "folder", tmp_path / "file.pt")
    whole = torch.load(tmp_path / "file.pt", weights_only=True)
    assert_same_state(whole["model"], state)
    assert whole["lp_pipe"]["step"] == 1
    assert whole["optimizer"]["0.weight"]["exp_avg"].shape == state["0.weight"].shape


class Refused:
    """A pipeline, and a folder with a good checkpoint of it to be spoilt."""

    def __init__(self, pipeline: pp.PipelineClient, folder: Path) -> None:
        self.pipeline, self.folder = pipeline, folder

    def by(self, kind: type[Exception], message: str) -> None:
        """Assert that the load is refused, and that the pipeline goes on as if nothing had been asked."""
        before = self.pipeline.fingerprint(), self.pipeline.current_step()
        with pytest.raises(kind, match=message):
            self.pipeline.load(self.folder)
        assert (self.pipeline.fingerprint(), self.pipeline.current_step()) == before
        self.pipeline.step(BATCHES[0])


def test_what_is_no_whole_checkpoint_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    with launched("thread", model_with_everything(), BATCHES, stages=2) as pipeline:
        pipeline.save(folder)
        list(pipeline.steps(1))
        refused = Refused(pipeline, folder)
        file, metadata = sorted(folder.glob("*.distcp"))[1], folder / ".metadata"
        content, described = file.read_bytes(), metadata.read_bytes()

        file.unlink()
        refused.by(pp.CheckpointError, rf"cannot read .*{file.name}")
        for damaged in (b"", content[: len(content) // 2], b"not torch"):
            file.write_bytes(damaged)
            refused.by(pp.CheckpointError, rf"cannot read .*{file.name}")
        file.write_bytes(content)

        for damaged in (b"", described[:40], described[:-1], b"not torch", pickle.dumps({})):
            metadata.write_bytes(damaged)
            refused.by(pp.CheckpointError, r"\.metadata is damaged")
        metadata.unlink()
        refused.by(pp.CheckpointError, "never finished")
        refused.folder = tmp_path / "nowhere"
        refused.by(pp.CheckpointError, "nowhere is no checkpoint: there is no such folder")
        for entry, message in (({"lp_pipe": {"format": 99}}, "format 99"), ({}, "no checkpoint of lp_pipe")):
            refused.folder = tmp_path / message
            save_with_plain_torch({**entry, "model": pipeline.state_dict()}, refused.folder)
            refused.by(pp.CheckpointError, message)

        metadata.write_bytes(described)
        pipeline.load(folder)
        assert pipeline.current_step() == 0


class Acts:
    """An object whose pickle does more than a pickle of data may."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self._path,)


@pytest.mark.parametrize("where", ["metadata", "entry"])
def test_nothing_but_data_is_unpickled(tmp_path: Path, where: str) -> None:
    with launched("thread", pp.Model([nn.Linear(D, D)], squared_error, sgd), stages=1) as pipeline:
        folder, trace = tmp_path / "checkpoint", tmp_path / "trace"
        pipeline.save(folder)
        if where == "metadata":
            (folder / ".metadata").write_bytes(pickle.dumps(Acts(trace)))
        else:
            save_with_plain_torch({"lp_pipe": [Acts(trace)], "model": pipeline.state_dict()}, folder)
        Refused(pipeline, folder).by(pp.CheckpointError, "is damaged" if where == "metadata" else "cannot read")
        assert not trace.exists()


@pytest.mark.parametrize("elsewhere", ["/dev/zero", "../other/share.distcp"])
def test_only_files_of_the_checkpoint_are_read(tmp_path: Path, elsewhere: str) -> None:
    with launched("thread", pp.Model([nn.Linear(D, D)], squared_error, sgd), stages=1) as pipeline:
        folder = tmp_path / "checkpoint"
        pipeline.save(folder)
        described = pickle.loads((folder / ".metadata").read_bytes())
        for stored in described.storage_data.values():
            stored.relative_path = elsewhere
        (folder / ".metadata").write_bytes(pickle.dumps(described))
        Refused(pipeline, folder).by(pp.CheckpointError, rf"\.metadata is damaged: .*{re.escape(elsewhere)}")


def save_with_plain_torch(state: dict[str, Any], folder: Path) -> None:
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder, overwrite=True), no_dist=True)


def test_a_checkpoint_of_another_model_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    with launched("thread", pp.Model([nn.Linear(D, D), nn.ReLU()], squared_error, adam), stages=2) as other:
        other.save(tmp_path / "names")
    layers = [pp.Layer(nn.Linear, D, 2), pp.Layer(nn.Linear, 2, D)]
    with launched("thread", pp.Model(layers, squared_error, adam), stages=2) as other:
        other.save(tmp_path / "shapes")
    layers = [pp.Layer(nn.Linear, D, D), pp.Layer(nn.Linear, D, D)]
    with launched("thread", pp.Model(layers, squared_error, adam), stages=2) as pipeline:
        refused = Refused(pipeline, tmp_path / "names")
        refused.by(
            pp.PipelineError, r"names is a checkpoint of another model: missing \['1.bias', '1.weight'\], unknown"
        )
        refused.folder = tmp_path / "shapes"
        refused.by(pp.PipelineError, r"another model: 0\.weight")


class Observes(nn.Module):
    """Makes its buffer longer once it has seen an input, as quantisation's observers of channels do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)
        self.register_buffer("largest", torch.tensor([]))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        seen = y.detach().abs().amax((0, 1))
        if self.largest.numel() == 0:
            self.largest.resize_(seen.shape).copy_(seen)
        else:
            self.largest.copy_(torch.maximum(self.largest, seen))
        return y / (self.largest + 1)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *others: Any) -> None:
        if state_dict[prefix + "largest"].numel() in (0, D):
            self.largest.resize_(state_dict[prefix + "largest"].shape)
        super()._load_from_state_dict(state_dict, prefix, *others)


def test_buffers_that_the_first_forward_makes_longer_are_trained_saved_and_loaded(tmp_path: Path) -> None:
    """Regression: such lengths were refused as another model's, evaluate failed, and sent buffers could not grow."""
    model = pp.Model([Observes(), Observes(), Observes()], squared_error, adam)
    plain = PlainLoop(model, 4)
    with launched("thread", model, stages=2, microbatches=4) as pipeline:
        untouched = pipeline.state_dict()
        pipeline.evaluate(BATCHES)
        assert_same_state(pipeline.state_dict(), untouched)
        for batch in BATCHES[:2]:
            assert pipeline.step(batch).loss == plain.step(batch)
        pipeline.save(tmp_path)
    with launched("thread", model, stages=3, microbatches=4) as pipeline:
        pipeline.load(tmp_path)
        plain.steps(BATCHES[2:4])
        for batch in BATCHES[2:4]:
            pipeline.step(batch)
        assert_same_state(pipeline.state_dict(), plain.state_dict())
    with launched("thread", model, stages=1, microbatches=4) as pipeline:
        wrong = {**plain.state_dict(), "1.largest": torch.ones(3)}
        with pytest.raises(pp.PipelineError, match=r"1\.largest has shape \[3\] there and \[0\] here"):
            pipeline.load_state_dict(wrong)
        pipeline.load_state_dict(plain.state_dict())
        assert_same_state(pipeline.state_dict(), plain.state_dict())


class Expanded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((1,), 0.5).expand(D))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.get_buffer("scale")


def test_buffers_of_which_an_element_is_there_many_times_are_loaded(tmp_path: Path) -> None:
    # They were trained and saved, and torch cannot copy into them: the checkpoint was lost.
    model = pp.Model([nn.Linear(D, D), Expanded(), nn.Linear(D, D)], squared_error, adam)
    with launched("thread", model, BATCHES, stages=2, microbatches=4) as pipeline:
        pipeline.step()
        pipeline.save(tmp_path)
        trained = list(pipeline.steps(1)), pipeline.fingerprint()
        pipeline.load(tmp_path)
        again = list(pipeline.steps(1)), pipeline.fingerprint()
        assert ([r.loss for r in again[0]], again[1]) == ([r.loss for r in trained[0]], trained[1])
        pipeline.load_state_dict({**pipeline.state_dict(), "1.scale": torch.arange(float(D))})
        assert torch.equal(pipeline.state_dict()["1.scale"], torch.arange(float(D)))


class Breaks(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("as it should")


def test_buffers_that_a_failed_step_has_made_longer_are_short_again() -> None:
    model = pp.Model([Observes(), Breaks()], squared_error, adam)
    with launched("thread", model, stages=2, microbatches=4) as pipeline:
        before = pipeline.state_dict()
        with pytest.raises(ValueError, match="as it should"):
            pipeline.step(BATCHES[0])
        assert_same_state(pipeline.state_dict(), before)


class Splits(nn.Module):
    """A layer for a Stash."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Transposed()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.inner(x), x


class Joins(Splits):
    """A layer for a Pop."""

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:  # type: ignore[override]
        y: Tensor = self.inner(x) + skip
        return y


class Transposed(nn.Module):
    """A layer whose first version kept the weight as nn.Linear does."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(D, D))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight

    def _load_from_state_dict(self, state_dict: Any, prefix: str, metadata: dict[str, Any], *others: Any) -> None:
        if metadata.get("version", 1) < 2:
            state_dict[prefix + "weight"] = state_dict[prefix + "weight"].t()
        super()._load_from_state_dict(state_dict, prefix, metadata, *others)


def test_modules_are_told_in_which_version_of_theirs_a_state_was_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: each state counted as an old one, so that loading and going back silently transposed the weights."""
    layers = [nn.Linear(D, D), Transposed(), pp.Stash("skip", Splits()), pp.Pop("skip", Joins())]
    model = pp.Model(layers, squared_error, adam)
    with launched("thread", model, BATCHES, stages=2, microbatches=4) as pipeline:
        list(pipeline.steps(1))
        fingerprint = pipeline.fingerprint()
        state = pipeline.state_dict()
        pipeline.save(tmp_path / "second")
        pipeline.load(tmp_path / "second")
        assert pipeline.fingerprint() == fingerprint
        pipeline.mirror()
        pipeline.go_back(1)
        assert pipeline.fingerprint() == fingerprint
        pipeline.load_state_dict(state)
        assert pipeline.fingerprint() == fingerprint
        whole = nn.Sequential(*map(unwrapped, layers))
        whole.load_state_dict(state)
        assert_same_state(whole.state_dict(), state)
        pipeline.load_state_dict(whole.state_dict())
        assert pipeline.fingerprint() == fingerprint
        monkeypatch.setattr(Transposed, "_version", 1)
        pipeline.save(tmp_path / "first")
        monkeypatch.undo()
        pipeline.load(tmp_path / "first")
        assert torch.equal(pipeline.state_dict()["1.weight"], state["1.weight"].t())


def test_a_checkpoint_of_another_optimizer_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    """SGD went on with Adam's learning rate, in silence; torch's own has a KeyError in the next step."""
    layers = [pp.Layer(nn.Linear, D, D), pp.Layer(nn.Linear, D, D)]
    with launched("thread", pp.Model(layers, squared_error, adam), BATCHES, stages=2) as pipeline:
        pipeline.step()
        pipeline.save(tmp_path / "adam")
        torch.save(pipeline.state_dict(), tmp_path / "model.pt")
    with launched("thread", pp.Model(layers, squared_error, sgd), BATCHES, stages=2) as pipeline:
        refused = Refused(pipeline, tmp_path / "adam")
        refused.by(pp.PipelineError, "of another optimizer, Adam, than this model's, SGD: give the model that one")
        refused.folder = tmp_path / "model.pt"
        refused.by(pp.CheckpointError, r"model.pt is a file, .* a folder: .*load_state_dict")


def test_adams_checkpoint_is_not_adamws(tmp_path: Path) -> None:
    """Regression: their options are alike, one of which tells them apart, and AdamW silently went on as Adam."""
    layers = [pp.Layer(nn.Linear, D, D), pp.Layer(nn.Linear, D, D)]
    with launched("thread", pp.Model(layers, squared_error, torch.optim.Adam), BATCHES, stages=2) as pipeline:
        pipeline.step()
        pipeline.save(tmp_path)
    with launched("thread", pp.Model(layers, squared_error, torch.optim.AdamW), BATCHES, stages=2) as pipeline:
        Refused(pipeline, tmp_path).by(pp.PipelineError, "of another optimizer, Adam, than this model's, AdamW")


def in_one_group(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=0.1, weight_decay=0.1)


def without_decay_of_biases(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    biases = [parameter for name, parameter in named if name.endswith("bias")]
    weights = [parameter for name, parameter in named if not name.endswith("bias")]
    return torch.optim.SGD([{"params": weights, "weight_decay": 0.1}, {"params": biases}], lr=0.1)


@pytest.mark.parametrize(
    ("saved", "loaded", "message"),
    [
        (without_decay_of_biases, in_one_group, r"0.weight and 0.bias in different parameter groups.*0.1 and 0"),
        (in_one_group, without_decay_of_biases, r"0.weight and 0.bias in one parameter group, .* in different ones"),
    ],
    ids=["joined", "divided"],
)
def test_a_checkpoint_of_other_parameter_groups_is_refused_and_changes_nothing(
    tmp_path: Path, saved: OptimizerFactory, loaded: OptimizerFactory, message: str
) -> None:
    """Joined ones took the options of the last parameter for all, divided ones those of the group that there was."""
    layers = [pp.Layer(nn.Linear, D, D), pp.Layer(nn.Linear, D, D)]
    with launched("thread", pp.Model(layers, squared_error, saved), BATCHES, stages=2) as pipeline:
        pipeline.step()
        pipeline.save(tmp_path)
    with launched("thread", pp.Model(layers, squared_error, loaded), BATCHES, stages=1) as pipeline:
        Refused(pipeline, tmp_path).by(pp.PipelineError, message)
    with launched("thread", pp.Model(layers, squared_error, saved), BATCHES, stages=1) as pipeline:
        pipeline.load(tmp_path)


def test_a_checkpoint_of_another_dtype_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    """The optimizer's state stayed of the old one: an error from inside torch, in the next step."""
    layers = [pp.Layer(nn.Linear, D, D), pp.Layer(nn.Linear, D, D)]
    doubles = [pp.Layer(nn.Linear, D, D, dtype=torch.float64), pp.Layer(nn.Linear, D, D, dtype=torch.float64)]
    with launched("thread", pp.Model(doubles, squared_error, adam), stages=2) as pipeline:
        pipeline.save(tmp_path)
    with launched("thread", pp.Model(layers, squared_error, adam), BATCHES, stages=2) as pipeline:
        Refused(pipeline, tmp_path).by(pp.PipelineError, "0.weight is torch.float64 there and torch.float32 here")


@pytest.mark.parametrize(("kind", "other"), [("sequential", "StepLR"), ("lambda", "sequential")])
def test_a_checkpoint_of_another_scheduler_is_refused_and_changes_nothing(
    tmp_path: Path, kind: str, other: str
) -> None:
    """SequentialLR ended in a bare KeyError, with some stages loaded; others went on with what they had in common."""
    schedulers = {**SCHEDULERS, "StepLR": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2)}
    with launched("thread", model_with_everything(lr_scheduler=schedulers[other]), BATCHES, stages=2) as pipeline:
        pipeline.step()
        pipeline.save(tmp_path)
    kinds = {"sequential": "SequentialLR of LinearLR and ExponentialLR", "lambda": "LambdaLR", "StepLR": "StepLR"}
    with launched("thread", model_with_everything(lr_scheduler=schedulers[kind]), BATCHES, stages=3) as pipeline:
        Refused(pipeline, tmp_path).by(
            pp.PipelineError, f"another lr_scheduler, {kinds[other]}, than this model's, {kinds[kind]}: give the model"
        )


@pytest.mark.parametrize("kind", ["cosine", "lambda", "one cycle", "sequential"])
def test_a_scheduler_that_a_checkpoint_has_not_begins_at_the_rates_that_were_saved(tmp_path: Path, kind: str) -> None:
    """A warmup's first rate was overwritten by what was saved, and then multiplied up, to three times that."""
    plain = torch.optim.Adam([nn.Parameter(torch.ones(1))], lr=0.03)
    scheduler, rates = SCHEDULERS[kind](plain), []
    for _ in range(5):
        rates.append(plain.param_groups[0]["lr"])
        plain.step()
        scheduler.step()
    layers = [pp.Layer(nn.Linear, D, D), pp.Layer(nn.Linear, D, D)]
    saved = pp.Model(layers, squared_error, lambda parameters: torch.optim.Adam(parameters, lr=0.03))
    with launched("thread", saved, BATCHES, stages=2) as pipeline:
        pipeline.step()
        pipeline.save(tmp_path)
    with launched("thread", replace(saved, optimizer=adam, lr_scheduler=SCHEDULERS[kind]), BATCHES * 2) as pipeline:
        pipeline.step()
        pipeline.load(tmp_path)
        found = []
        for _ in rates:
            found.append(pipeline.learning_rates()["0.weight"])
            pipeline.step()
    assert found == rates


def test_a_checkpoint_that_cannot_be_replaced_stays_whole(tmp_path: Path) -> None:
    class Stubborn(nn.Linear):
        def get_extra_state(self) -> Any:
            if self.weight[0, 0] > 1e6:
                raise ValueError("will not be saved")
            return {}

        def set_extra_state(self, state: Any) -> None:
            pass

    model = pp.Model([nn.Linear(1, 1), Stubborn(1, 1)], squared_error, sgd)
    with launched("thread", model, stages=2) as pipeline:
        pipeline.save(tmp_path)
        state, saved = pipeline.state_dict(), pipeline.fingerprint()
        pipeline.load_state_dict({**state, "1.weight": torch.full((1, 1), 1e7)})
        with pytest.raises(ValueError, match="will not be saved"):
            pipeline.save(tmp_path)
    with launched("thread", model, stages=1) as pipeline:
        pipeline.load(tmp_path)
        assert pipeline.fingerprint() == saved


def test_a_place_that_is_none_is_refused_with_where_to_save(tmp_path: Path) -> None:
    """Regression: None was a folder called "None", and a file a bare "File exists"."""
    (tmp_path / "model.pt").write_text("taken")
    before = sorted(Path().iterdir())
    with launched("thread", pp.Model([nn.Linear(1, 1)], squared_error, sgd), stages=1) as pipeline:
        for path in ("model.pt", "model.pt/step-3"):
            with pytest.raises(pp.CheckpointError, match=rf"cannot save to .*{path}: a checkpoint is a folder"):
                pipeline.save(tmp_path / path)
        nothing: Any = None
        for method in (pipeline.save, pipeline.save_async, pipeline.load, pipeline.export):
            with pytest.raises(TypeError, match="NoneType"):
                method(nothing)
        file: Any = tmp_path / "model.pt"
        with pytest.raises(pp.PipelineError, match="takes a dict of tensors by name, not PosixPath"):
            pipeline.load_state_dict(file)
    assert (sorted(Path().iterdir()), file.read_text()) == (before, "taken")


@pytest.mark.parametrize("save", ["save", "save_async"])
def test_a_share_that_cannot_be_written_leaves_the_old_checkpoint_and_no_memory_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save: str
) -> None:
    taken: list[Shares] = []

    class Watched(Shares):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            taken.append(self)

        def write(self, command: WriteShare) -> Any:
            if self._worker == 1 and fails:
                raise OSError("No space left on device")
            return super().write(command)

    monkeypatch.setattr("lp_pipe.pipeline.worker.worker.Shares", Watched)
    with launched("thread", pp.Model([nn.Linear(1, 1), nn.Linear(1, 1)], squared_error, sgd), stages=2) as pipeline:
        fails = False
        pipeline.save(tmp_path)
        fails, saved = True, pipeline.fingerprint()
        pipeline.load_state_dict({name: value + 1 for name, value in pipeline.state_dict().items()})
        with pytest.raises(pp.CheckpointError, match="No space left on device"):
            done = getattr(pipeline, save)(tmp_path)
            done.result()
        assert len(taken) == 2 and not any(shares._held for shares in taken)
        pipeline.load(tmp_path)
        assert pipeline.fingerprint() == saved


@pytest.mark.parametrize("then", ["save", "save_async"])
def test_saving_to_a_folder_again_before_it_is_written_leaves_the_newer_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    """Regression: the save that ended first deleted the other's files, and there was no checkpoint at all."""
    is_writing, is_overtaken = threading.Event(), threading.Event()

    class Slow(Shares):
        def write(self, command: WriteShare) -> Any:
            written = super().write(command)
            if self._worker == 1 and not is_writing.is_set():
                is_writing.set()
                is_overtaken.wait(0.5)  # the other one has to wait, so this is not to come
            elif self._worker == 1:
                is_overtaken.set()
                first.exception(10.0)
            return written

    monkeypatch.setattr("lp_pipe.pipeline.worker.worker.Shares", Slow)
    with launched("thread", pp.Model([nn.Linear(1, 1), nn.Linear(1, 1)], squared_error, sgd), stages=2) as pipeline:
        first = pipeline.save_async(tmp_path)
        assert is_writing.wait(10.0)
        pipeline.load_state_dict({name: value + 1 for name, value in pipeline.state_dict().items()})
        saved = pipeline.fingerprint()
        done = getattr(pipeline, then)(tmp_path)
        for future in filter(None, (first, done)):
            future.result(10.0)
        pipeline.load_state_dict({name: value + 1 for name, value in pipeline.state_dict().items()})
        pipeline.load(tmp_path)
        assert pipeline.fingerprint() == saved


@pytest.mark.parametrize("has_folder", [True, False], ids=["another folder", "no folder"])
def test_a_folder_that_is_another_one_on_each_host_is_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_folder: bool
) -> None:
    # Each host had its share, one had the metadata as well, and save() returned: nothing could ever load that.
    here, there = tmp_path / "here", tmp_path / "there"
    if has_folder:
        there.mkdir()

    class OnAnotherHost(Shares):
        def write(self, command: WriteShare) -> Any:
            return super().write(replace(command, folder=str(there)) if self._worker == 1 else command)

        def remove(self, command: RemoveShare) -> None:
            super().remove(replace(command, folder=str(there)) if self._worker == 1 else command)

    monkeypatch.setattr("lp_pipe.pipeline.worker.worker.Shares", OnAnotherHost)
    monkeypatch.setattr(host_visibility, "_APPEARS_WITHIN_S", 0.0)
    with launched("thread", pp.Model([nn.Linear(1, 1), nn.Linear(1, 1)], squared_error, sgd), stages=2) as pipeline:
        what = r"/here/step-0\S*, which stages/1 on \S+ has" if has_folder else "/there, which .*first stage has"
        with pytest.raises(CheckpointError, match=f"does not see .*{what}.*share"):
            pipeline.save(here)
    assert not [*here.iterdir(), *there.glob("*")]


def test_a_copy_whose_owner_has_died_is_forgotten_at_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer that was killed between a copy and its writing left every stage with a copy of its state for ever."""
    model = pp.Model([nn.Linear(1, 1), nn.Linear(1, 1)], squared_error, sgd)
    with launched("thread", model, stages=2) as pipeline:
        abandoned = pipeline._conductor.copy()
        pipeline.save_async(tmp_path / "a").result()  # no long time has passed: it may still be asked for
        pipeline._conductor.write_copy(str(tmp_path / "b"), abandoned)
        abandoned = pipeline._conductor.copy()
        monkeypatch.setattr("lp_pipe.pipeline.conductor.whole_model._COPY_PATIENCE_S", 0.0)
        pipeline.save_async(tmp_path / "c").result()
        with pytest.raises(lp.Unavailable, match=abandoned.version):
            pipeline._conductor.write_copy(str(tmp_path / "d"), abandoned)
        for name in "abc":
            pipeline.load(tmp_path / name)


def test_a_checkpoint_fetches_no_weights_from_the_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The conductor asked for the whole model, at every save and load, to know the names."""
    asked = []

    def some(workers: Workers, ranks: Any, command: Command[Any]) -> list[Any]:
        asked.append(type(command))
        return workers.each(ranks, [command] * len(ranks))

    monkeypatch.setattr(Workers, "some", some)
    with launched("thread", pp.Model([nn.Linear(1, 1), nn.Linear(1, 1)], squared_error, sgd), stages=2) as pipeline:
        pipeline.save(tmp_path)
        pipeline.load(tmp_path)
    assert {HoldShare, PlanShare, GetStateNames, ReadCheckpoint, AdoptCheckpoint} <= {*asked}
    assert GetState not in asked


def test_saving_again_leaves_one_checkpoint_in_the_folder(tmp_path: Path) -> None:
    (tmp_path / "mine.pt").touch()
    with launched("thread", pp.Model([nn.Linear(1, 1), nn.Linear(1, 1)], squared_error, sgd), stages=2) as pipeline:
        pipeline.save(tmp_path)
        pipeline.save(tmp_path)
    files = {path.name for path in tmp_path.glob("*.distcp")}
    assert len(files) == 2
    assert {path.name for path in tmp_path.iterdir()} == {".metadata", "mine.pt", *files}


@needs_disks
def test_a_full_disk_is_named_and_loses_no_room_to_what_has_failed(tmp_path: Path) -> None:
    def body() -> None:
        disks.mount_small(tmp_path, "64k")
        model = pp.Model([nn.Linear(1, 1), nn.Linear(100, 100, bias=False)], squared_error, sgd)
        with launched("thread", model, stages=2) as pipeline:
            pipeline.save(tmp_path / "old")
            before = sorted((tmp_path / "old").iterdir())
            for folder, left in (("old", before), ("old", before), ("new", [])):
                with pytest.raises(pp.CheckpointError, match=rf"No space left on device.*/{folder}/step-0-.*\.distcp"):
                    pipeline.save(tmp_path / folder)
                assert sorted((tmp_path / folder).iterdir()) == left

    disks.with_own_mounts(body)


def test_a_load_that_fails_halfway_is_mended_by_another_one_only(tmp_path: Path) -> None:
    """A scheduler may not take a state, which is found out when the weights are taken already."""

    class Fussy(torch.optim.lr_scheduler.StepLR):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            if state["step_size"] != self.step_size:
                raise ValueError("a state of other steps")
            super().load_state_dict(state)

    layers = [nn.Linear(1, 1), nn.Linear(1, 1)]
    batch = torch.ones(2, 1), torch.ones(2, 1)
    for size in (2, 3):
        model = pp.Model(layers, squared_error, sgd, functools.partial(Fussy, step_size=size))
        with launched("thread", model, stages=2) as pipeline:
            pipeline.step(batch)
            pipeline.save(tmp_path / str(size))
            if size == 2:
                continue
            with pytest.raises(ValueError, match="of other steps"):
                pipeline.load(tmp_path / "2")
            with pytest.raises(pp.PipelineError, match=r"loading .*2 has failed after it had changed some of them"):
                pipeline.step(batch)
            pipeline.load(tmp_path / "3")
            assert pipeline.step(batch).step == 1
