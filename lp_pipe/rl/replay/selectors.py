"""How a table chooses items: the options that users give it. The table itself keeps what they need."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Uniform:
    """Each item is equally likely."""


@dataclass(frozen=True)
class Prioritized:
    """An item is as likely as its priority to the power of `exponent`.

    importance: weights of a sample are (N · probability)^-importance, divided by the batch's largest. Source: Schaul et
    al., "Prioritized Experience Replay" (2016), sections 3.3 and 3.4.
    """

    exponent: float = 0.6
    importance: float = 0.4

    def __post_init__(self) -> None:
        """Raises:
        ValueError: a number is negative.
        """
        if not (self.exponent >= 0 and self.importance >= 0):
            raise ValueError(
                f"Prioritized: exponent and importance must be at least 0, got {self.exponent}, {self.importance}"
            )


@dataclass(frozen=True)
class Fifo:
    """The oldest item."""


@dataclass(frozen=True)
class Lifo:
    """The newest item."""


Selector = Uniform | Prioritized | Fifo | Lifo
