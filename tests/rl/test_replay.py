"""Replay tables sample by their rules, hold calls back by Reverb's ratio, and go on from a state with the same bits."""

import copy
import math
import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import lp_pipe as lp
import lp_pipe.rl as rl
from lp_pipe.rl.replay.key_order import KeyOrder
from lp_pipe.rl.replay.sum_tree import SumTree
from lp_pipe.rl.replay.table import TableState
from lp_pipe.rpc import codec
from tests.seeds import random_numbers


def items(*values: int) -> dict[str, Any]:
    numbers = np.array(values, dtype=np.int64)
    return {"x": numbers, "deep": (numbers * 2.0, np.stack([numbers] * 3, axis=1))}


def state(sampler: Any = None, remover: Any = None, max_size: int = 8, times: int = 0) -> TableState:
    table = rl.Table(max_size, sampler or rl.Uniform(), remover or rl.Fifo(), times)
    return TableState(table, np.random.default_rng(0))


@pytest.mark.parametrize("values", [range(4), range(4_000)])
@pytest.mark.parametrize("dtype", ["<f4", "m8[s]", "U5", "object", [("x", "f4"), ("y", "i8")]])
def test_a_sample_is_the_same_after_its_journey(values: Sequence[int], dtype: Any) -> None:
    table = state(max_size=4_000)
    table.insert({**items(*values), "odd": np.zeros((len(values), 3), dtype)})
    sample = table.sample(3 * len(values))
    payload = codec.encode(sample)
    copies = codec.decode(payload.body, [bytearray(one) for one in payload.buffers]), copy.deepcopy(sample)
    for other in (*copies, *(pickle.loads(pickle.dumps(sample, protocol)) for protocol in (2, 5))):
        assert type(other) is rl.Sample
        for (path, leaf), (other_path, other_leaf) in zip(
            rl.tree.leaves_of(sample), rl.tree.leaves_of(other), strict=True
        ):
            assert path == other_path and leaf.dtype == other_leaf.dtype and (leaf == other_leaf).all()
            assert other_leaf.flags.writeable and other_leaf.flags.aligned


def test_the_sums_follow_from_the_weights_alone() -> None:
    numbers = random_numbers(0)
    one, other = SumTree(100), SumTree(100)
    weights = np.array([numbers.random() for _ in range(100)])
    for _ in range(20):
        one.update(np.array([numbers.randrange(100) for _ in range(7)]), np.array([numbers.random() for _ in range(7)]))
    one.update(np.arange(100), weights)
    other.update(np.arange(100)[::-1].copy(), weights[::-1].copy())
    assert one.total == other.total
    shares = np.linspace(0.0, 1.0, 1000, endpoint=False)
    assert (one.find(shares) == other.find(shares)).all()
    for first, count in (
        (0, 100),
        (3, 1),
        (97, 3),
        *((numbers.randrange(60), numbers.randrange(1, 40)) for _ in range(9)),
    ):
        weights = np.array([numbers.random() for _ in range(count)])
        one.update(np.arange(first, first + count), weights)
        other.update_run(first, weights)
        assert (one._sums == other._sums).all()


def test_keys_are_found_with_their_slots_whichever_leave() -> None:
    numbers = random_numbers(3)
    order, expected, number = KeyOrder(20), dict[int, int](), 0
    for _ in range(2000):
        count = numbers.randrange(4)
        if len(expected) + count <= 20 and numbers.random() < 0.5:
            new = np.arange(number, number + count)
            order.append(new, new % 7)
            expected |= {key: key % 7 for key in new.tolist()}
            number += count
        elif expected and numbers.random() < 0.5:
            count = min(max(1, count), len(expected))
            keys = list(expected)[:count]
            assert order.remove_oldest(count).tolist() == [expected.pop(key) for key in keys]
        elif expected:
            key = numbers.choice([*expected])
            del expected[key]
            order.remove(key)
        assert order.slots().tolist() == [*expected.values()]
        some = [numbers.randrange(-1, number + 2) for _ in range(9)]
        assert order.slots_of(np.array(some)).tolist() == [expected.get(key, -1) for key in some]
        if expected:
            assert (order.oldest(), order.newest()) == (next(iter(expected.values())), list(expected.values())[-1])


@pytest.mark.parametrize("sampler", [rl.Uniform(), rl.Prioritized(0.7, 0.5)])
def test_samples_have_the_stated_probabilities(sampler: Any) -> None:
    table = state(sampler, max_size=50)
    priorities = np.arange(60) % 7
    table.insert(items(*range(60)), priorities)
    table.update_priorities([55, 3], [9.0, 5.0])  # 3 was removed
    expected = np.array([*priorities[10:]], dtype=float)
    expected[45] = 9.0
    expected = expected**0.7 / (expected**0.7).sum() if isinstance(sampler, rl.Prioritized) else np.full(50, 0.02)
    sample = table.sample(200_000)
    counts = np.bincount(sample.keys - 10, minlength=50)
    assert counts[expected == 0].sum() == 0
    likely = expected > 0
    distance = float(((counts[likely] - 200_000 * expected[likely]) ** 2 / (200_000 * expected[likely])).sum())
    assert abs(distance - likely.sum()) < 4 * math.sqrt(2 * likely.sum())  # as chi-square is distributed
    np.testing.assert_allclose(sample.probabilities, expected[sample.keys - 10])
    weights = (50 * sample.probabilities) ** -0.5
    if isinstance(sampler, rl.Prioritized):
        np.testing.assert_allclose(sample.weights, weights / weights.max())
    assert (sample.data["x"] == sample.keys).all() and (sample.data["deep"][1][:, 2] == sample.keys).all()
    assert table.info()["unknown_keys"] == 1


@pytest.mark.parametrize("sampler", [rl.Uniform(), rl.Prioritized(), rl.Fifo(), rl.Lifo()])
@pytest.mark.parametrize("remover", [rl.Fifo(), rl.Uniform(), rl.Lifo(), rl.Prioritized(1.0)])
def test_a_restored_table_goes_on_with_the_same_samples(sampler: Any, remover: Any) -> None:
    numbers = random_numbers(1)
    table = state(sampler, remover, times=3)
    for _ in range(40):
        if table.size < 4 or numbers.random() < 0.5:
            table.insert(items(*(numbers.randrange(99) for _ in range(numbers.randrange(1, 6)))))
        else:
            sample = table.sample(2)
            table.update_priorities(sample.keys, [numbers.random(), numbers.random()])
    restored = state(sampler, remover, times=3)
    restored.load_state_dict(table.state_dict())
    assert restored.info() == table.info()
    for _ in range(30):
        if table.size >= 3:
            for one, other in zip(table.sample(3)[:4], restored.sample(3)[:4], strict=True):
                np.testing.assert_array_equal(one, other)
        new = items(*(numbers.randrange(99) for _ in range(3)))
        assert (table.insert(new) == restored.insert(new)).all()
    assert restored.info() == table.info()


def test_items_leave_by_the_rule_of_the_remover() -> None:
    oldest, newest, least = (
        state(max_size=2),
        state(remover=rl.Lifo(), max_size=2),
        state(rl.Lifo(), max_size=2, times=1),
    )
    for table in (oldest, newest):
        table.insert(items(1, 2, 3))
    assert sorted(set(oldest.sample(50).data["x"])) == [2, 3] and sorted(set(newest.sample(50).data["x"])) == [1, 3]
    least.insert(items(1, 2))
    assert list(least.sample(2).data["x"]) == [2, 1] and least.size == 0


@pytest.mark.parametrize(
    "limiter", [rl.SampleToInsertRatio(2.0, 5, 4.0), rl.MinSize(3), rl.Table.queue(4).rate_limiter]
)
def test_the_limiter_is_reverbs(limiter: rl.RateLimiter) -> None:
    numbers = random_numbers(2)
    inserts = samples = deletes = 0
    for _ in range(10_000):
        count = numbers.randrange(1, 5)
        ratio, difference = limiter.samples_per_insert, inserts * limiter.samples_per_insert - samples
        may_insert = inserts + count - deletes <= limiter.min_size or difference + count * ratio <= limiter.max_diff
        may_sample = inserts - deletes >= limiter.min_size and difference - count >= limiter.min_diff
        assert limiter.may_insert(count, inserts, samples, deletes) == may_insert
        assert limiter.may_sample(count, inserts, samples, deletes) == may_sample
        if numbers.random() < 0.5 and may_insert:
            inserts += count
        elif may_sample:
            samples += count
        elif inserts > deletes and numbers.random() < 0.1:
            deletes += 1


@pytest.mark.usefixtures("warm_bare_template")
@pytest.mark.parametrize("mode", ["thread", "process"])
def test_calls_wait_for_the_limiter_in_the_order_of_arrival(mode: str) -> None:
    program = lp.Program("replay")
    limiter = rl.SampleToInsertRatio(1.0, 2, 2.0)
    tables = {"ratio": rl.Table(100, rl.Fifo(), rate_limiter=limiter), "queue": rl.Table.queue(2)}
    replay = program.add_node(rl.ReplayNode(tables), label="replay")
    with lp.launch(program, mode) as run:
        client = run.client(replay)
        client.info()  # calls that wait for the first connection may be sent in another order
        early = [client.futures.sample("ratio", 1) for _ in range(3)]
        assert not any(call.done() for call in early)
        assert client.insert("ratio", items(1)).tolist() == [0]
        assert not early[0].done()
        client.insert("ratio", items(2))
        assert early[1].result(10.0).times_sampled[0] == 2 and not early[2].done()
        client.insert("ratio", items(3))
        assert all(call.result(10.0).times_sampled[0] == place + 1 for place, call in enumerate(early))
        client.insert("queue", items(1, 2))
        blocked = client.futures.insert("queue", items(3))
        assert client.sample("queue", 1).data["x"].tolist() == [1]
        assert blocked.result(10.0).tolist() == [2]
        assert client.info()["queue"] == {"inserts": 3, "samples": 1, "deletes": 1, "size": 2, "unknown_keys": 0}
        saved = client.state_dict()
        client.sample("queue", 2)
        client.load_state_dict(saved)
        assert client.sample("queue", 2).data["x"].tolist() == [2, 3]
        with pytest.raises(ValueError, match="queue"):
            client.insert("queue", items(*range(5)))


@pytest.mark.parametrize(
    "call",
    [
        lambda table: table.insert(items(1), [math.nan]),
        lambda table: table.insert(items(1), [-1.0]),
        lambda table: table.insert({"x": np.zeros(1)}),
        lambda table: table.insert({**items(1), "x": np.zeros(1)}),
        lambda table: table.insert({**items(1), "x": np.zeros((1, 2), dtype=np.int64)}),
        lambda table: table.insert({**items(1), "x": np.zeros(2, dtype=np.int64)}),
        lambda table: table.update_priorities([0, 1], [0.5, math.inf]),
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(call: Any) -> None:
    table = state(rl.Prioritized())
    table.insert(items(1, 2))
    before = table.info()
    with pytest.raises(ValueError, match=r"key [012]|x|leaves|leading"):
        call(table)
    assert table.info() == before and (table.sample(100).probabilities == 0.5).all()


@pytest.mark.parametrize(
    "make",
    [
        lambda: rl.SampleToInsertRatio(4.0, 1, 3.0),
        lambda: rl.SampleToInsertRatio(0.0, 1, 3.0),
        lambda: rl.Table(0),
        lambda: rl.Table(5, rate_limiter=rl.MinSize(6)),
        lambda: rl.Prioritized(-1.0),
        lambda: rl.ReplayNode({}),
        lambda: rl.SampleToInsertRatio(1.0, 1, 2.0).check_sample(5, "t"),
        lambda: rl.Table.queue(3).rate_limiter.check_insert(4, "t"),
    ],
)
def test_options_that_cannot_work_are_refused(make: Any) -> None:
    with pytest.raises(ValueError, match=r"\d|table"):
        make()
