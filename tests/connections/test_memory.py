"""Memory for what a peer has announced."""

import pytest

from lp_pipe.connections.memory import memory_for
from tests.forking import holds_in_a_fork


@pytest.mark.parametrize("size", [1 << 10, 1 << 25])
def test_what_a_forked_child_writes_stays_its_own(size: int) -> None:
    """A data loader's workers are forked, and may work in place on what their parent has received."""
    memory = memory_for(size)

    def write() -> bool:
        memory[0] = 1
        return memory[0] == 1

    assert holds_in_a_fork(write)
    assert memory[0] == 0


@pytest.mark.parametrize("size", [1 << 10, 1 << 25])
def test_it_is_zero_writable_and_as_long_as_asked_for(size: int) -> None:
    memory = memory_for(size)
    assert len(memory) == size and not memory[size - 1]
    memory[size - 1 :] = b"x"
    assert memory[size - 1] == ord("x")


def test_more_than_there_is_is_a_memory_error() -> None:
    with pytest.raises(MemoryError):
        memory_for(1 << 60)
