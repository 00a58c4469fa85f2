"""A pipeline whose schedule has no backwards takes no steps: it evaluates."""

from typing import Any, NoReturn

from lp_pipe.errors import ScheduleError
from lp_pipe.pipeline.conductor.steps import SynchronousSteps
from lp_pipe.pipeline.worker.tasks import NOTHING_MORE, Wanted


class NoSteps(SynchronousSteps):
    """Refuses them; all else is as between two steps."""

    def step(self, batch: tuple[Any, Any] | None, more: int = 0, wanted: Wanted = NOTHING_MORE) -> NoReturn:
        """
        Raises:
            ScheduleError: says what such a pipeline is for.
        """
        name = self._config.schedule_for(self._config.microbatches).name
        raise ScheduleError(
            f"schedule {name!r} has no backwards, so that this pipeline takes no steps: it is for forward(), "
            "forward_stream() and evaluate(), which every other schedule has, too: to train, say schedule='1f1b'"
        )
