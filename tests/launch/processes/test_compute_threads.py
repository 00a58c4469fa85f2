"""The number of threads with which nodes compute; in thread mode for as long as the program runs."""

import threading

import numpy as np
import pytest
import torch
from threadpoolctl import threadpool_info

import lp_pipe as lp


def blas_threads() -> list[int]:
    np.ones(2) @ np.ones(2)
    return [library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"]


@pytest.mark.parametrize("count", [1, 3])
def test_blas_has_the_threads_of_the_nodes_while_they_are_threads(no_leaks: None, count: int) -> None:
    """numpy's sums had other last bits in thread mode than in process mode, which has one thread a node."""
    before = blas_threads()
    found: list[list[int]] = []
    program = lp.Program("blas")
    with program.group("node", resources=lp.Resources(threads=count)):
        program.add_node(lp.PyNode(lambda: found.append(blas_threads())))
    for _ in range(2):  # the second time another thread has set it before
        lp.launch(program, "thread").wait(20.0)
        assert found.pop() == [count] * len(before)
        assert blas_threads() == before


def computing_threads() -> int:
    return torch.get_num_threads()


def in_new_thread() -> int:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(computing_threads()))
    thread.start()
    thread.join()
    return found[0]


def test_the_script_has_its_own_number_of_torch_threads_during_and_after_a_run() -> None:
    # Set in the script's thread and undone in another one, it stayed at the nodes' count.
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    found: list[int] = []
    program = lp.Program("torch")
    program.add_node(lp.PyNode(lambda: found.append(computing_threads())), label="node")
    try:
        for _ in range(2):
            lp.launch(program, "thread").wait(20.0)
            assert found.pop() == 1
            assert (computing_threads(), in_new_thread()) == (2, 2)
    finally:
        torch.set_num_threads(before)
