"""N producers, and one consumer that pulls from all of them with futures.

    lp_pipe launch lp_pipe.programs.producers_consumer -- --num_producers=3

    producers/0 <--- pull() ---+
    producers/1 <--- pull() ---+--- consumer
    producers/2 <--- pull() ---+

The consumer keeps a few calls to every producer outstanding, which bounds how far producers work ahead of it.
The example tokenizes the standard library's sources, a shard of the files to each producer.
Source: Launchpad's example consumer_producers.
"""

import functools
import hashlib
import tokenize
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import lp_pipe as lp
from lp_pipe.nodes import user_code
from lp_pipe.programs.options import option, parse_options
from lp_pipe.programs.standard_library import short_name, standard_library
from lp_pipe.programs.waiting import until_the_stop

Produce = Callable[[int, int], Iterable[Any]]
Consume = Callable[[Iterator[Any]], object]


def producers_consumer(
    produce: Produce, consume: Consume, num_producers: int, *, outstanding: int = 2, name: str = "producers_consumer"
) -> lp.Program:
    """Return a program in which `consume(items)` gets what all producers yield; it ends when `consume` returns.

    produce: `produce(index, num_producers)`, called in producer `index`, yields its share of the items.
    consume: gets an iterator over the items; those of one producer keep their order, those of several are interleaved
        as they arrive.
    outstanding: calls to each producer at a time, and so how many items it is ahead of the consumer.

    An exception in `produce` is raised in `consume` where it takes the next item.

    Raises:
        ValueError: a number is below 1.
    """
    if num_producers < 1 or outstanding < 1:
        raise ValueError(
            f"{name}: each number must be at least 1, got num_producers={num_producers}, outstanding={outstanding}"
        )
    program = lp.Program(name)
    with program.group("producers"):
        # One thread, so that items are produced one after another, in the order of the calls.
        options = {"thread_pool_size": 1}
        producers = [
            program.add_node(lp.CourierNode(Producer, produce, index, num_producers, courier_kwargs=options))
            for index in range(num_producers)
        ]
    program.add_node(lp.PyClassNode(Consumer, producers, consume, outstanding), label="consumer")
    return program


class Pulled(NamedTuple):
    """An item, or the message that there are no more."""

    value: Any = None
    is_end: bool = False


class Producer:
    """A server that returns the items that `produce` yields."""

    def __init__(self, produce: Produce, index: int, num_producers: int) -> None:
        items = produce(index, num_producers)
        if not isinstance(items, Iterable):
            raise TypeError(
                f"producers_consumer: produce({index}, {num_producers}) returned {items!r}: it must yield items, or "
                "return a list of them"
            )
        self._items = iter(items)

    def pull(self) -> Pulled:
        """Return the next item; after the last one, the end at every call."""
        for value in self._items:
            return Pulled(value)
        return Pulled(is_end=True)


class Consumer:
    """A node that calls `consume` with the items of all producers, then ends the program."""

    def __init__(self, producers: list[lp.CourierClient], consume: Consume, outstanding: int) -> None:
        self._producers = producers
        self._consume = consume
        self._outstanding = outstanding

    def run(self) -> None:
        with until_the_stop():
            user_code.call(self._consume, self._items())
            lp.stop()

    def _items(self) -> Iterator[Any]:
        # A producer's first call is sent alone: it opens the connection, on which later calls keep their order.
        pulls = {index: deque([producer.futures.pull()]) for index, producer in enumerate(self._producers)}
        num_items = 0
        while pulls:
            for index in _whose_oldest_call_is_done(pulls):
                pulled = pulls[index].popleft().result()
                if pulled.is_end:
                    del pulls[index]  # the replies to its other outstanding calls are the end, too
                    continue
                while len(pulls[index]) < self._outstanding:
                    pulls[index].append(self._producers[index].futures.pull())
                num_items += 1
                lp.log_metrics({"producers_at_work": len(pulls)}, step=num_items)
                yield pulled.value


def _whose_oldest_call_is_done(pulls: dict[int, deque[Future[Pulled]]]) -> list[int]:
    wait([calls[0] for calls in pulls.values()], return_when=FIRST_COMPLETED)
    return [index for index, calls in pulls.items() if calls[0].done()]


# --- The example: how the standard library is written ---


class Tokenized(NamedTuple):
    """The statistics of one source file."""

    name: str
    sha256: str
    num_lines: int
    names: Counter[str]


@dataclass(frozen=True)
class ProducersConsumerOptions:
    """Tokenize the standard library's sources in several producers; one consumer adds up their statistics."""

    num_producers: int = option(2, "nodes that read and tokenize", at_least=1)
    outstanding: int = option(2, "calls to each producer at a time", at_least=1)
    files: int = option(150, "number of source files", at_least=1)


def tokenize_shard(index: int, num_producers: int, max_files: int) -> Iterator[Tokenized]:
    """Yield the statistics of every num_producers-th file, from `index` on."""
    for path in standard_library(max_files)[index::num_producers]:
        yield tokenize_file(path)


def tokenize_file(path: Path) -> Tokenized:
    source = path.read_bytes()
    with path.open("rb") as file:
        names = Counter(token.string for token in tokenize.tokenize(file.readline) if token.type == tokenize.NAME)
    return Tokenized(short_name(path), hashlib.sha256(source).hexdigest(), source.count(b"\n"), names)


def summarize(files: Iterable[Tokenized]) -> str:
    """Return a summary that does not depend on the order of the files."""
    digests, names, num_lines = {}, Counter[str](), 0
    for file in files:
        digests[file.name] = file.sha256
        names.update(file.names)
        num_lines += file.num_lines
    most_common = sorted(names.items(), key=lambda item: (-item[1], item[0]))[:10]
    listing = "".join(f"{name} {digest}\n" for name, digest in sorted(digests.items()))
    return (
        f"{len(digests)} files, {num_lines:,} lines, {names.total():,} names, {len(names):,} different ones\n"
        f"most common: {', '.join(f'{name} {count:,}' for name, count in most_common)}\n"
        f"sha256 of all files' digests {hashlib.sha256(listing.encode()).hexdigest()}"
    )


def print_summary(files: Iterable[Tokenized]) -> None:
    print(summarize(files), flush=True)


def make_program() -> lp.Program:
    """Make the example with the options given by flags."""
    options = parse_options(ProducersConsumerOptions, "lp_pipe.programs.producers_consumer")
    return producers_consumer(
        functools.partial(tokenize_shard, max_files=options.files),
        print_summary,
        options.num_producers,
        outstanding=options.outstanding,
    )
