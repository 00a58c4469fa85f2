"""The parts of the character GPT demo that need no launched program."""

from __future__ import annotations

import collections
import functools
import itertools
import math
import pathlib

import numpy as np
import pytest
import torch
from absl import flags
from absl.testing import flagsaver
from torch import nn

import lp_pipe.pipeline as pp
from examples import char_gpt
from tests.pipeline.plain_loop import PlainLoop, assert_same_state, launched


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    """Sixty small Python files, and some that the corpus leaves out."""
    for index in range(60):
        path = tmp_path / f"package{index % 3}" / f"module{index}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"def function_{index}(argument):\n    return argument + {index}\n")
    for skipped in ("site-packages/other.py", "package0/test/test_it.py", "package0/data.txt"):
        path = tmp_path / skipped
        path.parent.mkdir(exist_ok=True)
        path.write_text("left out")
    return tmp_path


@pytest.fixture
def feeder(folder: pathlib.Path) -> char_gpt.Feeder:
    return char_gpt.Feeder(batch_size=4, context=16, seed=1, root=str(folder))


def plain_model(config: char_gpt.Config) -> nn.Sequential:
    torch.manual_seed(config.seed)
    return nn.Sequential(*(factory() for _, factory in char_gpt.layer_factories(config)))


def same(one: char_gpt.Batch, other: char_gpt.Batch) -> bool:
    return torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])


def test_the_split_is_by_file_and_every_file_is_on_one_side(folder: pathlib.Path) -> None:
    training, validation = char_gpt.split_files(folder)
    assert training and validation
    assert set(training).isdisjoint(validation)
    assert set(training) | set(validation) == set(folder.glob("package?/*.py"))


def test_a_file_keeps_its_side_when_others_come(folder: pathlib.Path) -> None:
    before, _ = char_gpt.split_files(folder)
    for index in range(30):
        (folder / f"new{index}.py").write_text("pass\n")
    training, validation = char_gpt.split_files(folder)
    assert len(training) + len(validation) == 90
    assert set(before) <= set(training)


def test_reading_stops_after_the_file_that_reaches_the_limit(folder: pathlib.Path) -> None:
    training, _ = char_gpt.split_files(folder)
    first_two = char_gpt.encode(training[0].read_bytes() + b"\n" + training[1].read_bytes())
    assert np.array_equal(char_gpt.read_tokens(training, max_bytes=training[0].stat().st_size + 1), first_two)


def test_text_survives_tokens_and_strange_characters_become_unknown() -> None:
    text = "if x:\n\treturn '~'\n"
    assert char_gpt.decode(char_gpt.encode(text.encode()).tolist()) == text
    assert char_gpt.decode(char_gpt.encode(b"a\x0c\xff").tolist()) == "a??"


def test_a_batch_is_a_pure_function_of_seed_and_step(folder: pathlib.Path) -> None:
    one, other, reseeded = (char_gpt.Feeder(4, 16, seed, str(folder)) for seed in (1, 1, 2))
    expected = [one.batch(step) for step in range(3)]
    for step in (2, 0, 2, 1):
        assert same(other.batch(step), expected[step])
    assert not same(expected[0], expected[1])
    assert not same(expected[0], reseeded.batch(0))


def test_the_target_is_the_next_character(feeder: char_gpt.Feeder) -> None:
    for input_BT, target_BT in [feeder.batch(0), *feeder.validation(2)]:
        assert input_BT.dtype == target_BT.dtype == torch.int64
        assert input_BT.shape == target_BT.shape == (4, 16)
        assert torch.equal(input_BT[:, 1:], target_BT[:, :-1])


def test_validation_batches_are_fixed(feeder: char_gpt.Feeder) -> None:
    before = feeder.validation(3)
    feeder.batch(7)
    assert len(before) == 3
    assert all(map(same, before, feeder.validation(3)))


def test_the_feeder_knows_its_position(feeder: char_gpt.Feeder) -> None:
    assert feeder.position()["last_step"] is None
    feeder.batch(9)
    feeder.batch(9)  # first and last stage both ask
    assert feeder.position()["last_step"] == 9
    assert feeder.position()["characters_seen"] == 10 * 4 * 16


def test_a_folder_without_text_is_an_error_that_names_it(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match=str(tmp_path)):
        char_gpt.Feeder(4, 16, 1, str(tmp_path))


def test_the_baseline_equals_a_count_by_hand() -> None:
    training, validation = b"banana band", b"a banana\nbandana"
    pairs = collections.Counter(itertools.pairwise(training))
    firsts = collections.Counter(training[:-1])
    expected = [
        -math.log2((pairs[a, b] + 1) / (firsts[a] + char_gpt.VOCABULARY)) for a, b in itertools.pairwise(validation)
    ]
    batch = char_gpt.cut_batch(char_gpt.encode(validation), np.array([0]), len(validation) - 1)
    measured = char_gpt.bigram_bits_per_char(char_gpt.bigram_bits(char_gpt.encode(training)), [batch])
    assert measured == pytest.approx(sum(expected) / len(expected))


def test_the_layers_learn(feeder: char_gpt.Feeder) -> None:
    config = char_gpt.Config(width=16, layers=1, heads=2, context=16, batch_size=4, steps=60)
    model = plain_model(config)
    optimizer = char_gpt.optimizer(list(model.named_parameters()), learning_rate=1e-2)
    scheduler = char_gpt.lr_scheduler(optimizer, config.steps)
    losses = []
    for step in range(config.steps):
        input_BT, target_BT = feeder.batch(step)
        value, metrics = char_gpt.loss(model(input_BT), target_BT)
        assert float(metrics["bits_per_char"]) == pytest.approx(value.item() / math.log(2))
        value.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(value.item())
    assert losses[0] == pytest.approx(math.log(char_gpt.VOCABULARY), rel=0.1)
    assert losses[-1] < 0.6 * losses[0]


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "zbv", "dualpipev"])
def test_every_schedule_trains_the_same_gpt(feeder: char_gpt.Feeder, schedule: str) -> None:
    config = char_gpt.Config(width=32, layers=4, heads=2, context=16, batch_size=4, steps=4, dropout=0.1)
    model = pp.Model(
        [pp.Layer(factory, name=name) for name, factory in char_gpt.layer_factories(config)],
        loss=char_gpt.loss,
        optimizer=functools.partial(char_gpt.optimizer, learning_rate=1e-2),
    )
    batches = [feeder.batch(step) for step in range(config.steps)]
    plain = PlainLoop(model, 4)
    with launched("thread", model, batches, stages=2, schedule=schedule, microbatches=4) as pipeline:
        assert [result.loss for result in pipeline.steps()] == plain.steps(batches)
        assert_same_state(pipeline.state_dict(), plain.state_dict())


def test_no_character_sees_its_future() -> None:
    config = char_gpt.Config(width=16, layers=2, heads=2, context=16)
    model = plain_model(config).eval()
    tokens_BT = torch.arange(16).reshape(1, 16)
    changed_BT = tokens_BT.clone()
    changed_BT[0, 10:] += 1
    assert torch.equal(model(tokens_BT)[:, :10], model(changed_BT)[:, :10])
    assert not torch.equal(model(tokens_BT)[:, 10:], model(changed_BT)[:, 10:])


def test_a_layer_without_matrices_gets_an_optimizer_too() -> None:
    norm = nn.LayerNorm(4)
    optimizer = char_gpt.optimizer(list(norm.named_parameters()), learning_rate=1e-3)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0]


def test_the_learning_rate_rises_then_falls() -> None:
    shares = [char_gpt.warmup_then_cosine(step, num_steps=100) for step in range(101)]
    peak = shares.index(max(shares))
    assert shares[peak] == 1.0
    assert shares[: peak + 1] == sorted(shares[: peak + 1])
    assert shares[peak:] == sorted(shares[peak:], reverse=True)
    assert shares[100] == pytest.approx(0.05)


def test_generated_text_depends_on_the_seed_alone() -> None:
    def forward(tokens_BT: torch.Tensor) -> torch.Tensor:
        assert tokens_BT.shape[1] <= 8
        return torch.zeros(*tokens_BT.shape, char_gpt.VOCABULARY)

    texts = [char_gpt.generate(forward, "def ", 20, context=8, temperature=1.0, seed=seed) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    assert all(text.startswith("def ") and len(text) == 24 for text in texts)


def test_the_metrics_of_a_step_hold_the_speed() -> None:
    result = pp.StepResult(step=6, loss=1.5, metrics={"bits_per_char": 2.164}, seconds=0.5)
    assert char_gpt.metrics_of(result, char_gpt.Config(batch_size=4, context=8, steps=20)) == {
        "loss": 1.5,
        "bits_per_char": 2.164,
        "characters_per_s": 64.0,
        "total_steps": 20,
    }


def test_every_setting_is_a_flag_and_heads_must_divide_the_width() -> None:
    assert all(flags.FLAGS[name].default == value for name, value in vars(char_gpt.DEFAULT).items())
    with flagsaver.flagsaver(), pytest.raises(flags.IllegalFlagValueError, match="--heads must divide --width"):
        flags.FLAGS(["program", "--heads=5"])
