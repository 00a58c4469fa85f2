import os
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _one_order_of_sums() -> None:
    """Have cuBLAS split sums in one way, before anything here or a template of processes starts it."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"


@pytest.fixture(autouse=True)
def _fast_launches(_one_order_of_sums: None, warm_template: None) -> None:
    """Import torch once for all tests: it takes seconds, and each process takes more of them to start CUDA."""


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Sum in one order, in the plain loop too."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
