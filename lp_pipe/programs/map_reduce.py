"""MapReduce: a master distributes tasks to mappers and reducers; a node that dies is restarted.

    lp_pipe launch lp_pipe.programs.map_reduce -- --job=inverted_index

    mappers/*  --- next_task, commit ---> master <--- next_task, commit ---  reducers/*
        |                                                                       ^
        +-------- a file for each (map task, partition) in the work folder -----+

Source: Dean & Ghemawat, "MapReduce: Simplified Data Processing on Large Clusters" (OSDI 2004): tasks 3.1, failures 3.3,
granularity 3.5, partitioning 4.1, order 4.2, combiner 4.3. Our work folder, like their global file system, also holds
the intermediate files: a mapper's death costs only the task that it worked on, and no finished one.
"""

import hashlib
import heapq
import re
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import lp_pipe as lp
from lp_pipe.nodes import user_code
from lp_pipe.programs.map_reduce_master import MAP, REDUCE, MapReduceTask, Master, WorkerId
from lp_pipe.programs.options import option, parse_options
from lp_pipe.programs.standard_library import short_name, standard_library
from lp_pipe.programs.waiting import until_the_stop
from lp_pipe.rpc import codec

Key = Any
Value = Any
Mapper = Callable[[Any], Iterable[tuple[Key, Value]]]
Reducer = Callable[[Key, list[Value]], Value]
OnResult = Callable[[list[tuple[Key, Value]]], object]

_TASKS_PER_MAPPER = 8  # many more tasks than mappers (3.5): this balances the load, and a death costs little
_WANTED = "it must yield (key, value) pairs, or return a list of them"


def map_reduce(
    inputs: Sequence[Any],
    mapper: Mapper,
    reducer: Reducer,
    num_mappers: int,
    num_reducers: int,
    combiner: Reducer | None = None,
    *,
    on_result: OnResult,
    num_tasks: int | None = None,
    work_folder: Path | None = None,
    name: str = "map_reduce",
) -> lp.Program:
    """Return a program that computes `reducer(key, values)` for every key of the pairs that `mapper` yields.

    mapper: yields (key, value) pairs for one input. Keys are str, bytes, int, or tuples of these.
    reducer: gets the values of a key in the order of the inputs and of the mapper's pairs.
    combiner: a reducer for the values of one key within a map task, applied before they are sent; the reducer gets its
        results.
    on_result: called once in the master's node with all (key, result) pairs in the order of the keys.
    num_tasks: map tasks that the inputs are split into; default: 8 for each mapper.
    work_folder: a folder that all nodes share, for the folder of intermediate files; default: the run's folder. The
        files are removed once the result is delivered, and kept if the program fails or is stopped before.

    When a node dies, mapper, reducer and combiner may run again on the same input, but each task's output counts once.
    The result does not depend on that if they are functions of their arguments.

    Raises:
        ValueError: a number is below 1.
    """
    if min(num_mappers, num_reducers, 1 if num_tasks is None else num_tasks) < 1:
        numbers = f"num_mappers={num_mappers}, num_reducers={num_reducers}, num_tasks={num_tasks}"
        raise ValueError(f"{name}: each number must be at least 1, got {numbers}")
    job = Job(mapper, reducer, combiner, num_reducers)
    splits = _split(inputs, num_tasks or _TASKS_PER_MAPPER * num_mappers)
    program = lp.Program(name)
    master = program.add_node(lp.CourierNode(MergingMaster, splits, num_reducers, work_folder, on_result), "master")
    for kind, count in ((MAP, num_mappers), (REDUCE, num_reducers)):
        with program.group(kind, on_failure="restart"):
            for _ in range(count):
                program.add_node(lp.PyClassNode(MapReduceWorker, master, kind, job))
    return program


def _split(inputs: Sequence[Any], num_tasks: int) -> list[Sequence[Any]]:
    """Split the inputs into consecutive parts of about equal size, none of them empty."""
    num_tasks = min(num_tasks, len(inputs))
    bounds = [len(inputs) * task // num_tasks for task in range(num_tasks + 1)] if num_tasks else [0]
    return [inputs[begin:end] for begin, end in pairwise(bounds)]


@dataclass(frozen=True)
class Job:
    """The user's functions, and the work of a map or reduce task with them."""

    mapper: Mapper
    reducer: Reducer
    combiner: Reducer | None
    num_reducers: int

    def map(self, inputs: Sequence[Any], prefix: Path) -> list[Path]:
        """Write a file with keys and values for each partition."""
        groups = _grouped(pair for record in inputs for pair in self._pairs_of(record))
        partitions: list[dict[Key, list[Value]]] = [{} for _ in range(self.num_reducers)]
        for key, values in groups.items():
            combined = values if self.combiner is None else [user_code.call(self.combiner, key, values)]
            partitions[partition_of(key, self.num_reducers)][key] = combined
        return [_write(Path(f"{prefix}.{index}"), partition) for index, partition in enumerate(partitions)]

    def reduce(self, paths: Sequence[Path], prefix: Path) -> list[Path]:
        """Write a file with the partition's keys, in order, and their results; `paths` in the order of map tasks."""
        groups: dict[Key, list[Value]] = defaultdict(list)
        for path in paths:
            for key, values in _read(path).items():
                groups[key] += values
        in_order = sorted(groups, key=order_of)
        return [_write(prefix, [(key, user_code.call(self.reducer, key, groups[key])) for key in in_order])]

    def _pairs_of(self, record: Any) -> Iterator[tuple[Key, Value]]:
        pairs = self.mapper(record)
        if not isinstance(pairs, Iterable):
            raise TypeError(f"map_reduce: the mapper returned {pairs!r} for {record!r}: {_WANTED}")
        for pair in pairs:
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                raise TypeError(f"map_reduce: the mapper gave {pair!r} for {record!r}: {_WANTED}")
            check_key(pair[0])
            yield pair[0], pair[1]


class MapReduceWorker:
    """A mapper or a reducer, which does one task after another until there are no more of its kind."""

    def __init__(self, master: lp.CourierClient, kind: str, job: Job) -> None:
        self._master = master
        self._work = {MAP: job.map, REDUCE: job.reduce}[kind]
        self._kind = kind

    def run(self) -> None:
        with until_the_stop():
            self._work_off()

    def _work_off(self) -> None:
        worker: WorkerId = self._master.register(self._kind, lp.context().index)
        while (task := self._next_task(worker)) is not None:
            # Each incarnation of a worker has its own file names, so a half-written file of a dead one is never read.
            prefix = task.folder / f"{worker.kind}-{task.index}-by-{worker.index}-{worker.incarnation}"
            self._master.commit(worker, task.index, self._work(task.inputs, prefix))

    def _next_task(self, worker: WorkerId) -> MapReduceTask | None:
        task: MapReduceTask | None = self._master.next_task(worker)
        return task


class MergingMaster(Master):
    """A master that waits for the last reduce task, delivers the result, and ends the program."""

    def __init__(
        self, splits: Sequence[Sequence[Any]], num_reducers: int, folder: Path | None, on_result: OnResult
    ) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="map_reduce-", dir=folder or lp.context().run_dir))
        self._on_result = on_result
        super().__init__(splits, num_reducers, self._folder)

    def run(self) -> None:
        outputs = self.wait_for_outputs()
        if outputs is None:
            return  # the program was stopped before it was done
        in_order = heapq.merge(*(_read(path) for path in outputs), key=lambda pair: order_of(pair[0]))
        user_code.call(self._on_result, list(in_order))
        shutil.rmtree(self._folder)
        lp.stop()


def _grouped(pairs: Iterable[tuple[Key, Value]]) -> dict[Key, list[Value]]:
    groups: dict[Key, list[Value]] = defaultdict(list)
    for key, value in pairs:
        groups[key].append(value)
    return groups


def _write(path: Path, content: object) -> Path:
    try:
        path.write_bytes(codec.dumps(content))  # sends classes of __main__ by value, as calls do
    except OSError as error:  # add the path, which the error of a full disk lacks
        raise OSError(error.errno, error.strerror, str(path)) from error
    return path


def _read(path: Path) -> Any:
    return codec.loads(path.read_bytes())


def partition_of(key: Any, num_partitions: int) -> int:
    """Hash `key` to a partition (Dean & Ghemawat 2004, 4.1); Python's own `hash` differs between processes."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest()) % num_partitions


def order_of(key: Any) -> tuple[str, Any]:
    """Return a sort key: bytes before ints before strs before tuples, also inside tuples; else the key's own order."""
    return type(key).__name__, tuple(map(order_of, key)) if type(key) is tuple else key


def check_key(key: Any) -> None:
    """Check a key's type, before it becomes a dict's key, where 1, 1.0 and True are equal.

    Raises:
        TypeError: the key is not a str, bytes, int or tuple of these; equal keys of other types may hash differently.
    """
    _check(key, key)


def _check(part: Any, key: Any) -> None:
    if type(part) is tuple:
        for item in part:
            _check(item, key)
    elif type(part) not in (str, bytes, int):
        raise TypeError(
            f"map_reduce key {key!r}: {part!r} is of type {type(part).__name__}, but keys must be str, bytes, int or "
            "tuples of these: let the mapper convert it"
        )


# --- The examples: the words of the standard library's sources ---

_WORD = re.compile(r"[a-z]{3,}")
_SHOWN = 10


@dataclass(frozen=True)
class MapReduceOptions:
    """Count the words of the standard library's sources, or index the files that they are in."""

    job: str = option("word_count", "the result to compute", choices=("word_count", "inverted_index"))
    num_mappers: int = option(2, "nodes that read files", at_least=1)
    num_reducers: int = option(2, "nodes that combine results", at_least=1)
    files: int = option(600, "number of source files", at_least=1)


def words_of(path: Path) -> list[str]:
    return _WORD.findall(path.read_text(encoding="utf-8", errors="replace").lower())


def count_words(path: Path) -> Iterator[tuple[str, int]]:
    for word in words_of(path):
        yield word, 1


def add_up(word: str, counts: list[int]) -> int:
    return sum(counts)


def index_words(path: Path) -> Iterator[tuple[str, str]]:
    name = short_name(path)
    for word in dict.fromkeys(words_of(path)):
        yield word, name


def sort_names(word: str, names: list[str]) -> list[str]:
    return sorted(names)


def print_counts(counts: list[tuple[str, int]]) -> None:
    most_common = sorted(counts, key=lambda item: (-item[1], item[0]))[:_SHOWN]
    print(f"{sum(count for _, count in counts):,} words, {len(counts):,} different ones")
    print("most common:", ", ".join(f"{word} {count:,}" for word, count in most_common))
    _save(f"{word}\t{count}" for word, count in counts)


def print_index(index: list[tuple[str, list[str]]]) -> None:
    rare = [(word, names[0]) for word, names in index if len(names) == 1][:_SHOWN]
    print(f"{len(index):,} words in {len({name for _, names in index for name in names}):,} files")
    print("in one file only:", ", ".join(f"{word} ({name})" for word, name in rare))
    _save(f"{word}\t{' '.join(names)}" for word, names in index)


def _save(lines: Iterable[str]) -> None:
    text = "".join(f"{line}\n" for line in lines).encode()
    path = lp.context().run_dir / "result.tsv"
    path.write_bytes(text)
    print(f"all of it is in {path}, sha256 {hashlib.sha256(text).hexdigest()}", flush=True)


def word_count(
    paths: Sequence[Path], num_mappers: int, num_reducers: int, on_result: OnResult = print_counts
) -> lp.Program:
    """Return a program that counts each word in the files; a combiner counts within each map task."""
    return map_reduce(
        paths, count_words, add_up, num_mappers, num_reducers, add_up, on_result=on_result, name="word_count"
    )


def inverted_index(
    paths: Sequence[Path], num_mappers: int, num_reducers: int, on_result: OnResult = print_index
) -> lp.Program:
    """Return a program that lists the files that contain each word."""
    return map_reduce(
        paths, index_words, sort_names, num_mappers, num_reducers, on_result=on_result, name="inverted_index"
    )


def make_program() -> lp.Program:
    """Make the example with the options given by flags."""
    options = parse_options(MapReduceOptions, "lp_pipe.programs.map_reduce")
    make = {"word_count": word_count, "inverted_index": inverted_index}[options.job]
    return make(standard_library(options.files), options.num_mappers, options.num_reducers)
