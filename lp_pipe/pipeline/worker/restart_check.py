"""A check that the process of a stage worker is the one that the conductor knows, and not its successor."""

from lp_pipe.errors import Unavailable
from lp_pipe.pipeline.protocol import Handlers, IsAsBuilt, Join


class RestartCheck:
    """Remembers whether this process has joined the pipeline, and whether it has trained.

    Without it a worker that dies between two operations, and is back before the next one, would take part in that one
    with the initial weights: channels tell of a death, but not every operation uses them.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._is_joined = False
        self._has_changed = False

    def handlers(self) -> Handlers:
        return dict([Join.by(self.join), IsAsBuilt.by(self.is_as_built)])

    def join(self, _: Join) -> None:
        """Join the pipeline, before the conductor's first operation.

        Raises:
            Unavailable: another conductor was there before, which has died.
        """
        if self._is_joined:
            raise Unavailable(f"{self._name} refuses: the first worker was started again. Call recover(), then load()")
        self._is_joined = True

    def rejoin(self) -> None:
        """Join again, with workers that were started again."""
        self._is_joined = True

    def note_change(self) -> None:
        """Note that weights, buffers or the optimizer's state are about to change."""
        self._has_changed = True

    def is_as_built(self, _: IsAsBuilt) -> bool:
        """Return whether nothing has been trained or loaded."""
        return not self._has_changed

    def check_joined(self) -> None:
        """Refuse to give away the weights if this process has not joined.

        Raises:
            Unavailable: the weights are the initial ones, not those that the conductor asks for.
        """
        if not self._is_joined:
            raise Unavailable(f"{self._name} was started again, with the initial weights. Call recover(), then load()")
