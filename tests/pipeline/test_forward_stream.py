"""Inference on a stream of inputs, of which several are in the stages at a time."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import lp_pipe.pipeline as pp
from tests.pipeline.plain_loop import D, PlainLoop, adam, launched, random_batches, squared_error

pytestmark = pytest.mark.usefixtures("no_leaks")

WORDS, LENGTH = 13, 12


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(WORDS, D), nn.Embedding(LENGTH, D)

    def forward(self, ids_BT: Tensor) -> Tensor:
        x: Tensor = self.words(ids_BT) + self.positions(torch.arange(ids_BT.shape[1]))
        return x


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.mlp = nn.LayerNorm(D), nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x_BTD: Tensor) -> Tensor:
        query, key, value = self.qkv(self.norm(x_BTD)).chunk(3, -1)
        x_BTD = x_BTD + nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return x_BTD + self.dropout(self.mlp(x_BTD).relu())


def gpt() -> pp.Model:
    layers = [pp.Layer(Embedding), pp.Layer(Block), pp.Layer(Block), pp.Layer(nn.Linear, D, WORDS)]
    return pp.Model(layers, squared_error, adam, seed=4)


PROMPTS = [[1, 2, 3], [5], [7, 8]]


def greedy(plain: PlainLoop, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(plain.output(torch.tensor([tokens]))[0, -1].argmax()))
    return tokens


def test_sequences_generate_in_turn_what_each_generates_alone() -> None:
    """The next token of a sequence needs its last one: three inputs are in flight, one of each sequence."""
    sequences, count = [list(prompt) for prompt in PROMPTS], 6

    def inputs() -> Iterator[Tensor]:
        for _ in range(count):
            for tokens in sequences:
                yield torch.tensor([tokens])

    plain = PlainLoop(gpt(), 1)
    with launched("thread", gpt(), stages=3) as pipeline:
        for index, logits in enumerate(pipeline.forward_stream(inputs(), in_flight=len(sequences))):
            sequences[index % 3].append(int(logits[0, -1].argmax()))
    assert sequences == [greedy(plain, prompt, count) for prompt in PROMPTS]
    assert len({token for tokens in sequences for token in tokens}) > 3  # not one word for ever


def test_outputs_come_in_order_and_inputs_are_taken_lazily() -> None:
    model = pp.Model([pp.Layer(nn.Linear, D, D), pp.Layer(nn.Tanh)], squared_error, adam)
    values = [x for x, _ in random_batches([1, 3, 2, 5, 1, 2, 4])]
    taken: list[int] = []

    def inputs() -> Iterator[Tensor]:
        for index, value in enumerate(values):
            taken.append(index)
            yield value

    with launched("thread", model, stages=2) as pipeline:
        stream = pipeline.forward_stream(inputs())
        assert not taken
        first = next(stream)
        assert taken == [0, 1, 2, 3]  # two for each of two stages
        outputs = [first, *stream]
        assert [torch.equal(a, pipeline.forward(b)) for a, b in zip(outputs, values, strict=True)] == [True] * 7


class AlwaysDropout(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, 0.5, training=True)


@pytest.mark.parametrize("stages", [1, 2])
def test_what_draws_in_eval_mode_too_draws_the_same_for_each_input(stages: int) -> None:
    """The numbers do not depend on the inputs on the way beside it, which depend on the number of stages."""
    model = pp.Model([pp.Layer(nn.Linear, D, D), pp.Layer(AlwaysDropout)], squared_error, adam)
    batches = random_batches([1, 3, 2, 5, 1, 2, 4])
    with launched("thread", model, stages=stages) as pipeline:
        alone = [pipeline.forward(x) for x, _ in batches]
        assert any((output == 0).any() for output in alone)
        streamed = pipeline.forward_stream(x for x, _ in batches)
        assert [torch.equal(a, b) for a, b in zip(streamed, alone, strict=True)] == [True] * 7
        by_one = sum(pipeline.evaluate([batch]).loss * len(batch[0]) for batch in batches) / 18
        assert pipeline.evaluate(batches).loss == pytest.approx(by_one)


def test_a_stream_that_is_left_early_or_fails_leaves_the_pipeline_as_it_was() -> None:
    model = pp.Model([pp.Layer(nn.Linear, D, D), pp.Layer(nn.Linear, D, D)], squared_error, adam)
    batches = random_batches([4, 4])
    plain = PlainLoop(model, 2)
    with launched("thread", model, batches, stages=2, microbatches=2) as pipeline:
        x = batches[0][0]
        stream = pipeline.forward_stream(x for _ in range(100))
        next(stream)
        assert pipeline.step().loss == plain.step(batches[0])  # between two outputs, too
        stream.close()  # type: ignore[attr-defined]
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            list(pipeline.forward_stream([x, x[..., :3]]))
        with pytest.raises(pp.PipelineError, match="in_flight=0"):
            pipeline.forward_stream([x], in_flight=0)
        assert list(pipeline.forward_stream([])) == []
        assert pipeline.step().loss == plain.step(batches[1])
