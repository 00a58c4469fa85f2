"""What watches the steps of an environment loop."""

from typing import Any, NamedTuple, Protocol


class TimeStep(NamedTuple):
    """A step of one environment, as an observer gets it. observation: after the action."""

    action: Any
    reward: float
    terminated: bool
    truncated: bool
    observation: Any


class Observer(Protocol):
    """Watches the steps of an environment loop."""

    def observe_first(self, env: Any, observation: Any) -> None:
        """Take note of an episode's first observation."""

    def observe(self, env: Any, step: TimeStep) -> None:
        """Take note of a step."""

    def metrics(self) -> dict[str, float]:
        """Return numbers about what was observed."""
