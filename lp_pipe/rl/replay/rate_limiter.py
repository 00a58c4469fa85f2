"""When a table takes items, and when it gives samples: Reverb's rule for the ratio of the two."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class RateLimiter:
    """Keeps inserts · samples_per_insert - samples between `min_diff` and `max_diff`, once there are `min_size` items.

    A batch is admitted as a whole. Source: Cassirer et al., "Reverb: A Framework for Experience Replay" (2021),
    section 3.4.
    """

    samples_per_insert: float
    min_size: int
    min_diff: float
    max_diff: float

    def may_insert(self, count: int, inserts: int, samples: int, deletes: int) -> bool:
        """Return whether `count` items may be inserted now."""
        is_filling = inserts + count - deletes <= self.min_size
        return is_filling or (inserts + count) * self.samples_per_insert - samples <= self.max_diff

    def may_sample(self, count: int, inserts: int, samples: int, deletes: int) -> bool:
        """Return whether `count` items may be sampled now."""
        has_enough = inserts - deletes >= self.min_size
        return has_enough and inserts * self.samples_per_insert - samples - count >= self.min_diff

    def check_insert(self, count: int, table: str) -> None:
        """Refuse an insert that no later state admits.

        Raises:
            ValueError: the band is too narrow for it.
        """
        band = self.max_diff - self.min_diff
        if count > self.min_size and count * self.samples_per_insert > band:
            most = max(self.min_size, math.floor(band / self.samples_per_insert))
            raise ValueError(
                f"an insert of {count} items never passes the rate limiter of table {table!r}: at most {most} fit"
            )

    def check_sample(self, count: int, table: str) -> None:
        """Refuse a sample that no later state admits.

        Raises:
            ValueError: the band is too narrow for it.
        """
        most = max(self.max_diff, self.samples_per_insert * self.min_size) - self.min_diff
        if count > most:
            raise ValueError(
                f"a sample of {count} items never passes the rate limiter of table {table!r}: at most "
                f"{math.floor(most)} fit"
            )


class MinSize(RateLimiter):
    """A limiter that gives samples once there are `size` items, and takes items always."""

    def __init__(self, size: int) -> None:
        """Raises:
        ValueError: `size` is below 1.
        """
        if size < 1:
            raise ValueError(f"MinSize: size must be at least 1, got {size}")
        super().__init__(1.0, size, -math.inf, math.inf)


class SampleToInsertRatio(RateLimiter):
    """A limiter that gives `samples_per_insert` samples for each item, within a band.

    min_size: items before the first sample. error_buffer: how far samples may run ahead of, or behind, the ratio.
    """

    def __init__(self, samples_per_insert: float, min_size: int, error_buffer: float) -> None:
        """Raises:
        ValueError: a number is out of range, or the band is too narrow for a single item.
        """
        if not samples_per_insert > 0 or min_size < 1:
            raise ValueError(
                "SampleToInsertRatio: samples_per_insert must be above 0 and min_size at least 1, got "
                f"{samples_per_insert} and {min_size}"
            )
        least = max(1.0, samples_per_insert)
        if not error_buffer >= least:
            raise ValueError(
                f"SampleToInsertRatio: error_buffer must be at least {least:g}, or the limiter would stop both sides; "
                f"got {error_buffer}"
            )
        middle = samples_per_insert * min_size
        super().__init__(samples_per_insert, min_size, middle - error_buffer, middle + error_buffer)
