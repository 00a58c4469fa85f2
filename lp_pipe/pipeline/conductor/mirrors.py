"""The last states of all workers in memory: which worker guards which, and to which steps all can go back."""

from collections.abc import Sequence

from lp_pipe.errors import PipelineError
from lp_pipe.pipeline.conductor.steps import Steps
from lp_pipe.pipeline.conductor.workers import Workers
from lp_pipe.pipeline.protocol import ForgetMirrors, GoBack, ListMirrors, MakeMirror, SetGuard, SettleMirrors
from lp_pipe.rpc import CourierClient


class StageMirrors:
    """The mirrors of all workers. One thread uses them, between operations.

    me: a client of the conductor's node, for the worker before its own one, whose mirrors its own worker keeps.
    """

    def __init__(self, workers: Workers, steps: Steps) -> None:
        self._workers = workers
        self._steps = steps
        self._last: int | None = None  # the step of the last mirrors
        self._are_guarded = False

    def make(self, me: CourierClient) -> int:
        """Let each worker copy its state, for itself and its guard; return the step."""
        self._guard(me)
        if self._last == self._steps.done:  # if two were on their way to the guards, a death would leave some of each
            self.forget(self._steps.done)
        self._last = self._steps.done
        self._workers.all(MakeMirror(self._steps.manifest()))
        return self._steps.done

    def steps(self) -> list[int]:
        """Return the steps to which all workers can go back."""
        return common_steps(self._workers.all(ListMirrors()))

    def go_back(self, step: int, me: CourierClient) -> None:
        """Go on from the state after so many steps.

        Raises:
            PipelineError: the step is none of `steps`; nothing has changed.
        """
        self._guard(me)
        self._workers.all(SettleMirrors())
        _check_is_held(step, self.steps())
        with self._steps.inconsistent_on_failure(f"going back to step {step} has failed"):
            found = self._workers.all(GoBack(step))[0]
        self._last = step
        self._steps.go_to(found)

    def forget(self, first: int = 0) -> None:
        """Forget mirrors from step `first` on: the state is, or is about to be, another one."""
        self._workers.all(SettleMirrors())
        self._workers.all(ForgetMirrors(first))

    def guard_anew(self) -> None:
        """Tell the workers their guards again: one was restarted, and knows none."""
        self._are_guarded = False

    def _guard(self, me: CourierClient) -> None:
        if not self._are_guarded:
            clients = self._workers.clients(me)
            guards = [*clients[1:], clients[0]]
            self._workers.each(range(len(guards)), [SetGuard(guard) for guard in guards])
            self._are_guarded = True


def common_steps(held: Sequence[dict[int, list[int]]]) -> list[int]:
    """Return the steps of which every worker's state is held by some worker, in order.

    held: each worker's reply to `ListMirrors`, by rank.
    """
    by_rank = [{step for found in held for step in found.get(rank, ())} for rank in range(len(held))]
    return sorted(set.intersection(*by_rank))


def check_guards(world_size: int) -> None:
    """Refuse a pipeline of one worker.

    Raises:
        PipelineError: no other worker could keep its mirrors.
    """
    if world_size < 2:
        raise PipelineError("mirror() needs at least 2 stage workers, got 1: a neighbour keeps each worker's state")


def _check_is_held(step: int, steps: Sequence[int]) -> None:
    if step not in steps:
        known = ", ".join(map(str, steps)) or "none"
        raise PipelineError(f"go_back({step}): not every worker's state of that step is in memory, but of {known}")
