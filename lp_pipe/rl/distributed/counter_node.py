"""The node with the counts and evaluations of an experiment."""

from collections.abc import Mapping
from typing import Any

from lp_pipe.programs.generations import GenerationServer
from lp_pipe.rl.experiment import Evaluation
from lp_pipe.rl.rounds.evaluations import EvaluationDue, Evaluations


class ExperimentCounter(GenerationServer):
    """The node with the counts of the experiment and its evaluations."""

    def __init__(self) -> None:
        super().__init__()
        self._evaluations = Evaluations()
        self._shown: dict[str, int] = {}

    async def open(self, generation: str, evaluation: Evaluation, shown: Mapping[str, int]) -> list[int]:
        """Begin a generation; return the rounds after which an evaluation is to be done.

        shown: the largest counts that were ever given: after going back `get` returns no lower ones.
        """
        self._show(shown)
        state = self._evaluations.state_dict()
        self._evaluations = Evaluations(evaluation)
        self._evaluations.load_state_dict(state)
        self._generation = generation
        self._changes.notify()
        return self._evaluations.all_due()

    async def add_round(self, generation: str, number: int, counts: Mapping[str, int], is_last: bool) -> bool:
        """Take the counts after a round; return whether they make an evaluation due."""
        self._check(generation)
        self._show(counts)
        is_due = self._evaluations.add_round(number, counts, is_last)
        self._changes.notify()
        return is_due

    async def is_good_enough(self, generation: str, number: int) -> bool:
        """Wait for the evaluations up to a round; return whether the experiment ends because of them."""
        await self._until(generation, lambda: self._evaluations.are_in(number))
        return self._evaluations.is_good_enough(number)

    async def end(self, generation: str) -> None:
        """Let the newest weights be evaluated, and wait until all evaluations are in."""
        self._check(generation)
        self._evaluations.request()
        self._changes.notify()
        await self._until(generation, lambda: self._evaluations.next_due() is None)

    async def next_due(self) -> tuple[str, EvaluationDue]:
        """Wait for an evaluation that is to be done; return it, with the generation.

        Raises:
            StaleGeneration: the program stops.
        """
        while self._generation is None or (due := self._evaluations.next_due()) is None:
            await self._change()
        return self._generation, due

    async def add(self, generation: str, number: int, returns: list[float]) -> None:
        """Take the returns of an evaluation."""
        self._check(generation)
        self._evaluations.add(number, returns)
        self._changes.notify()

    async def get(self) -> dict[str, int]:
        """Return the counts after the newest round that was learned. They never become less."""
        await self._until_opened()  # the learner then tells what was shown before a death
        self._show(self._evaluations.counts)
        return dict(self._shown)

    def _show(self, counts: Mapping[str, int]) -> None:
        self._shown |= {name: max(count, self._shown.get(name, 0)) for name, count in counts.items()}

    async def curve(self) -> list[tuple[int, float]]:
        """Return the environment steps and score of every evaluation."""
        return self._evaluations.curve

    async def state_dict(self) -> dict[str, Any]:
        return self._evaluations.state_dict()

    async def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state, in the next generation."""
        self._generation = None
        self._evaluations.load_state_dict(state)
        self._changes.notify()
