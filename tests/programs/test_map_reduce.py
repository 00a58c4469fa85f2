"""MapReduce: the same result as a plain loop, also when workers die on the way."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import lp_pipe as lp
from lp_pipe.programs.map_reduce import (
    Job,
    add_up,
    check_key,
    count_words,
    inverted_index,
    map_reduce,
    order_of,
    partition_of,
    word_count,
)
from lp_pipe.programs.map_reduce_master import MAP, REDUCE, MapReduceTask, Master, StaleWorker
from lp_pipe.programs.standard_library import short_name, standard_library
from tests.checkpoint import disks
from tests.programs.conftest import WITHIN_S, Delivered, Once, kill_this_process, stop_when

PATHS = standard_library(120)


def words_of(path: Path) -> list[str]:
    return re.findall("[a-z]{3,}", path.read_text(encoding="utf-8", errors="replace").lower())


@pytest.fixture(scope="module")
def counts() -> list[tuple[str, int]]:
    """Count the words without any program."""
    return sorted(Counter(word for path in PATHS for word in words_of(path)).items())


def test_word_count_counts_as_a_counter_does(mode: str, delivered: Delivered, counts: list[tuple[str, int]]) -> None:
    assert delivered.of(word_count(PATHS, num_mappers=3, num_reducers=2, on_result=delivered), mode) == counts


def test_an_inverted_index_equals_a_dict(mode: str, delivered: Delivered) -> None:
    index = defaultdict(set)
    for path in PATHS:
        for word in words_of(path):
            index[word].add(path)
    expected = [(word, sorted(map(short_name, paths))) for word, paths in sorted(index.items())]
    assert delivered.of(inverted_index(PATHS, num_mappers=2, num_reducers=3, on_result=delivered), mode) == expected


@pytest.mark.usefixtures("no_leaks")
@pytest.mark.parametrize("victim", ["mappers", "reducers"])
def test_a_worker_killed_half_way_changes_nothing(
    victim: str, delivered: Delivered, once: Once, counts: list[tuple[str, int]]
) -> None:
    def count_or_die(path: Path) -> Iterator[tuple[str, int]]:
        for number, pair in enumerate(count_words(path)):
            if victim == "mappers" and path == PATHS[50] and number == 100 and once():
                kill_this_process()
            yield pair

    def add_or_die(word: str, numbers: list[int]) -> int:
        if victim == "reducers" and word == "self" and once():
            kill_this_process()
        return sum(numbers)

    program = map_reduce(PATHS, count_or_die, add_or_die, 2, 2, add_up, on_result=delivered)
    assert delivered.of(program, "process") == counts
    assert {label: delivered.restarts(label) for label in ("mappers", "reducers")} == {
        "mappers": int(victim == "mappers"),
        "reducers": int(victim == "reducers"),
    }


def test_a_mapper_that_fails_once_is_started_again(mode: str, delivered: Delivered, once: Once) -> None:
    def map_letters(text: str) -> Iterator[tuple[str, int]]:
        yield text[0], 1
        if text == "cd" and once():
            raise OSError("a passing fault")
        yield text[1], 1

    program = map_reduce(["ab", "cd", "ab"], map_letters, add_up, 2, 2, on_result=delivered)
    assert delivered.of(program, mode) == [("a", 2), ("b", 2), ("c", 1), ("d", 1)]
    assert delivered.restarts("mappers") == 1


def test_a_mapper_that_always_fails_ends_the_program_with_its_error(mode: str, delivered: Delivered) -> None:
    def refuse(text: str) -> Iterator[tuple[str, int]]:
        raise ValueError(f"cannot read {text}")

    run = lp.launch(map_reduce(["x"], refuse, add_up, 1, 1, on_result=delivered), mode)
    with pytest.raises(lp.NodeError, match="cannot read x") as caught:
        run.wait(WITHIN_S)
    assert (caught.value.label, caught.value.type_name) == ("mappers", "ValueError")


def test_a_reducer_gets_values_in_the_order_of_the_inputs(mode: str, delivered: Delivered) -> None:
    def map_number(number: int) -> list[tuple[tuple[str, int], int]]:
        return [(("rest", number % 3), number), (("rest", number % 3), -number)]

    def first_values(key: tuple[str, int], values: list[int]) -> list[int]:
        return values[:4]

    program = map_reduce(range(100), map_number, first_values, 3, 2, on_result=delivered, num_tasks=17)
    assert delivered.of(program, mode) == [
        (("rest", 0), [0, 0, 3, -3]),
        (("rest", 1), [1, -1, 4, -4]),
        (("rest", 2), [2, -2, 5, -5]),
    ]


def test_a_stop_half_way_waits_for_nobody_and_fails_nobody(mode: str, delivered: Delivered, tmp_path: Path) -> None:
    def block(text: str) -> Iterator[tuple[str, int]]:
        if text == "b":
            (tmp_path / "blocked").touch()
            lp.wait_for_stop()
        yield text, 1

    stop_when(tmp_path / "blocked", map_reduce(["a", "b"], block, add_up, 2, 2, on_result=delivered), mode)


def test_no_inputs_give_no_results_and_no_files_are_left(mode: str, delivered: Delivered, tmp_path: Path) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    program = map_reduce([], count_words, add_up, 2, 2, on_result=delivered, work_folder=folder)
    assert delivered.of(program, mode) == []
    assert not list(folder.iterdir())


def test_numbers_below_one_are_refused() -> None:
    for numbers in ((0, 1, 1), (1, 0, 1), (1, 1, 0)):
        with pytest.raises(ValueError, match="at least 1"):
            map_reduce([], count_words, add_up, numbers[0], numbers[1], on_result=print, num_tasks=numbers[2])


def test_partitions_are_the_same_in_every_process() -> None:
    # Written down: Python's own hash of a str would differ from one run to the next.
    assert [partition_of(key, 7) for key in ("self", b"self", 12, ("a", 1), -1)] == [5, 2, 4, 5, 3]
    assert set(Counter(partition_of(str(number), 5) for number in range(1000)).values()) <= set(range(150, 250))


@pytest.mark.parametrize("key", [1.0, True, None, frozenset("a"), ("a", [1]), object()])
def test_keys_that_might_print_differently_are_refused(key: Any) -> None:
    with pytest.raises(TypeError, match="str, bytes, int or tuples"):
        check_key(key)


@pytest.mark.parametrize("key", [1.0, True, ["a"]])
def test_a_key_is_looked_at_before_it_meets_one_that_equals_it(key: Any, tmp_path: Path) -> None:
    """1.0 was counted as 1 where both were in one map task, and refused elsewhere; a list was "unhashable"."""
    job = Job(lambda key: [(key, 1)], add_up, None, 1)
    with pytest.raises(TypeError, match=r"keys must be str, bytes, int or tuples of these"):
        job.map([1, key], tmp_path / "map")


def test_a_reducer_that_yields_is_told_so(tmp_path: Path) -> None:
    """Mappers yield, reducers must not. Regression: the error was "cannot pickle 'generator' object"."""

    def reducer(key: str, counts: list[int]) -> Iterator[int]:
        yield sum(counts)

    paths = Job(lambda key: [(key, 1)], reducer, None, 1).map(["a"], tmp_path / "map")
    with pytest.raises(TypeError, match=r"reducer is a generator"):
        Job(lambda key: [(key, 1)], reducer, None, 1).reduce(paths, tmp_path / "reduce")


def test_keys_of_several_types_are_sorted_by_type(delivered: Delivered) -> None:
    # Each is a key; the reducers failed when they met in one partition: "'<' not supported between …".
    keys = ["a", 1, b"a", ("a", 2), (1, "a"), -1]
    program = map_reduce(keys, lambda key: [(key, 1)], add_up, 2, 2, on_result=delivered)
    expected = [b"a", -1, 1, "a", (1, "a"), ("a", 2)]
    assert delivered.of(program, "thread") == [(key, 1) for key in expected]
    assert sorted(["b", "a", "ab"], key=order_of) == ["a", "ab", "b"]


@pytest.mark.parametrize("produced", [None, ["ab"], [("a", 1, 2)], [1]])
def test_a_mapper_that_gives_no_pairs_is_told_so(produced: Any, tmp_path: Path) -> None:
    job = Job(lambda line: produced, add_up, None, 1)
    with pytest.raises(TypeError, match=r"the mapper .* for 'some line': .*\(key, value\) pairs"):
        job.map(["some line"], tmp_path / "map")


@pytest.fixture
def master(no_leaks: None, tmp_path: Path) -> Iterator[lp.CourierClient]:
    """Two map tasks, one reduce task, and no workers but the test."""
    program = lp.Program("master")
    program.add_node(lp.CourierNode(Master, [["a"], ["b"]], 1, tmp_path), label="master")
    with lp.launch(program, "thread") as run:
        yield run.client("master")


def test_a_task_whose_worker_has_died_goes_to_another(master: lp.CourierClient, tmp_path: Path) -> None:
    dead, other = master.register(MAP, 0), master.register(MAP, 1)
    assert master.next_task(dead) == MapReduceTask(0, ["a"], tmp_path)
    assert master.next_task(other) == MapReduceTask(1, ["b"], tmp_path)
    master.commit(other, 1, [tmp_path / "b"])
    waiting = master.futures.next_task(other)
    successor = master.register(MAP, 0)
    assert waiting.result(WITHIN_S) == MapReduceTask(0, ["a"], tmp_path)
    with pytest.raises(StaleWorker):
        master.commit(dead, 0, [tmp_path / "late"])
    with pytest.raises(StaleWorker):
        master.next_task(dead)
    master.commit(other, 0, [tmp_path / "a"])
    assert master.next_task(successor) is None


def test_reducers_wait_until_everything_is_mapped_and_get_files_by_task(
    master: lp.CourierClient, tmp_path: Path
) -> None:
    mapper, reducer = master.register(MAP, 0), master.register(REDUCE, 0)
    waiting = master.futures.next_task(reducer)
    for name in ("a", "b"):
        assert not waiting.done()
        task = master.next_task(mapper)
        master.commit(mapper, task.index, [tmp_path / name])
    assert waiting.result(WITHIN_S) == MapReduceTask(0, [tmp_path / "a", tmp_path / "b"], tmp_path)
    master.commit(reducer, 0, [tmp_path / "c"])
    assert master.next_task(reducer) is None


@pytest.mark.skipif(bool(disks.why_not()), reason=disks.why_not() or "there are disks")
def test_a_full_disk_is_said_with_the_file_that_it_had_no_room_for(tmp_path: Path) -> None:
    def body() -> None:
        disks.mount_small(tmp_path / "disk", "64k")
        many = map_reduce(
            ["word"], _many_pairs, add_up, num_mappers=1, num_reducers=1, on_result=print, work_folder=tmp_path / "disk"
        )
        with pytest.raises(lp.NodeError, match=r"No space left on device: '.*/disk/map_reduce-"):
            lp.launch(many, "thread", run_dir=tmp_path / "run").wait(WITHIN_S)

    disks.with_own_mounts(body)


def _many_pairs(word: str) -> Iterator[tuple[str, int]]:
    for number in range(10_000):
        yield f"{word} {number}", 1
