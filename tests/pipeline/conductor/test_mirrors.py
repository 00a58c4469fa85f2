"""The steps to which all workers of a pipeline can go back."""

from lp_pipe.pipeline.conductor.mirrors import common_steps


def test_after_a_death_only_steps_that_somebody_holds_of_every_worker_count() -> None:
    # Three workers; each holds its own mirrors and those of the one before it. Worker 1 has died and holds nothing.
    held: list[dict[int, list[int]]] = [{0: [4, 5], 2: [4, 5]}, {}, {2: [4, 5], 1: [4]}]
    assert common_steps(held) == [4]
    assert common_steps([held[0], {}, {}]) == []
