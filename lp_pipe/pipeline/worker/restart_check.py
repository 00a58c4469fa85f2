"""What the process of a stage worker has done so far: one that was started again has forgotten it."""

from lp_pipe.errors import Unavailable
from lp_pipe.pipeline.protocol import Handlers, IsAsBuilt, Join


class RestartCheck:
    """`join` and `is_as_built` are also the worker's methods, for its conductor.

    Without it a worker that dies between two operations, and is back before the next one, would take part in that with
    the initial weights: channels tell of a death, but not every operation uses them.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._is_joined = False
        self._has_changed = False

    def handlers(self) -> Handlers:
        return dict([Join.by(self.join), IsAsBuilt.by(self.is_as_built)])

    def join(self, _: Join) -> None:
        """Before the conductor's first operation.

        Raises:
            Unavailable: there was another one before, which has died.
        """
        if self._is_joined:
            raise Unavailable(f"{self._name}: the first worker was started again: recover(), then load()")
        self._is_joined = True

    def rejoin(self) -> None:
        """From now on with workers that were started again."""
        self._is_joined = True

    def note_change(self) -> None:
        """Weights, buffers or the optimizer's state are about to."""
        self._has_changed = True

    def is_as_built(self, _: IsAsBuilt) -> bool:
        """Whether nothing has been trained or loaded."""
        return not self._has_changed

    def check_joined(self) -> None:
        """Before the weights go anywhere.

        Raises:
            Unavailable: others take them for what this process has forgotten.
        """
        if not self._is_joined:
            raise Unavailable(f"{self._name} was started again, with the initial weights: recover(), then load()")
