"""Several producers and one consumer which pulls from all of them."""

import functools
import hashlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import lp_pipe as lp
from lp_pipe.programs.producers_consumer import Producer, producers_consumer, summarize, tokenize_shard
from lp_pipe.programs.standard_library import short_name, standard_library
from tests.programs.conftest import WITHIN_S, Delivered, stop_when


def count_up(index: int, num_producers: int) -> Iterator[tuple[int, int]]:
    for number in range(20 * index):
        yield index, number


def test_every_item_arrives_once_and_those_of_one_producer_in_order(mode: str, delivered: Delivered) -> None:
    def consume(items: Iterator[tuple[int, int]]) -> None:
        numbers = defaultdict(list)
        for index, number in items:
            numbers[index].append(number)
        delivered(dict(numbers))

    program = producers_consumer(count_up, consume, num_producers=4, outstanding=3)
    assert delivered.of(program, mode) == {1: list(range(20)), 2: list(range(40)), 3: list(range(60))}


@pytest.mark.usefixtures("no_leaks")
@pytest.mark.parametrize("outstanding", [1, 4])
def test_a_producer_is_never_further_ahead_than_was_asked(outstanding: int) -> None:
    taken: list[int] = []
    ahead: list[int] = []

    def produce(index: int, num_producers: int) -> Iterator[int]:
        for number in range(100):
            ahead.append(number - len(taken))
            yield number

    producers_consumer_run = lp.launch(producers_consumer(produce, taken.extend, 1, outstanding=outstanding), "thread")
    producers_consumer_run.wait(WITHIN_S)
    assert taken == list(range(100))
    assert max(ahead) <= outstanding


def test_the_consumers_end_is_the_programs_end(mode: str, delivered: Delivered) -> None:
    def forever(index: int, num_producers: int) -> Iterator[int]:
        while True:
            yield index

    def take_three(items: Iterator[int]) -> None:
        delivered([next(items) for _ in range(3)])

    assert delivered.of(producers_consumer(forever, take_three, 1), mode) == [0, 0, 0]


def test_a_producers_exception_ends_the_program_and_names_the_producer(mode: str) -> None:
    def break_down(index: int, num_producers: int) -> Iterator[int]:
        yield index
        if index == 1:
            raise ValueError("no more ore")

    def consume(items: Iterator[Any]) -> None:
        list(items)

    run = lp.launch(producers_consumer(break_down, consume, 2), mode)
    with pytest.raises(lp.NodeError, match="no more ore") as caught:
        run.wait(WITHIN_S)
    assert caught.value.type_name == "ValueError"
    assert "producers/1" in str(caught.value)


def test_a_stop_half_way_waits_for_nobody_and_fails_nobody(mode: str, tmp_path: Path) -> None:
    def block(index: int, num_producers: int) -> Iterator[int]:
        yield index
        (tmp_path / "blocked").touch()
        lp.wait_for_stop()

    stop_when(tmp_path / "blocked", producers_consumer(block, list, 2), mode)


def test_numbers_below_one_are_refused() -> None:
    for numbers in ({"num_producers": 0}, {"num_producers": 1, "outstanding": 0}):
        with pytest.raises(ValueError, match="at least 1"):
            producers_consumer(count_up, list, **numbers)


def test_the_example_finds_in_shards_what_one_loop_finds(mode: str, delivered: Delivered) -> None:
    produce = functools.partial(tokenize_shard, max_files=30)
    plain = summarize(tokenize_shard(0, 1, max_files=30))
    assert delivered.of(producers_consumer(produce, lambda files: delivered(summarize(files)), 3), mode) == plain
    digests = {short_name(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in standard_library(30)}
    listing = "".join(f"{name} {digests[name]}\n" for name in sorted(digests))
    assert plain.endswith(hashlib.sha256(listing.encode()).hexdigest())


def test_a_produce_that_gives_no_items_is_told_so() -> None:
    with pytest.raises(TypeError, match=r"produce\(0, 2\) returned None: it must yield items"):
        Producer(lambda index, num_producers: None, 0, 2)  # type: ignore[arg-type,return-value]


def test_a_consume_that_would_not_run_fails_the_program(mode: str) -> None:
    """Regression: the program ended well, and nothing had been consumed."""

    async def consume(items: Iterator[Any]) -> None:
        list(items)

    run = lp.launch(producers_consumer(count_up, consume, 1), mode)
    with pytest.raises(lp.NodeError, match=r"consumer/0 failed: TypeError: .*consume is async"):
        run.wait(WITHIN_S)
