"""Advice on errors that say that memory is short: which options would need less of it."""

import contextlib
from collections.abc import Iterator

import torch

from lp_pipe.errors import add_note

_MESSAGES = ("can't allocate memory", "not enough memory", "Cannot allocate memory")  # of torch, on the CPU
_OUT_OF_MEMORY = (MemoryError, torch.OutOfMemoryError)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocation of Python or torch has failed, on the CPU or a GPU."""
    if isinstance(error, _OUT_OF_MEMORY):
        return True
    if isinstance(error, RuntimeError | OSError) and any(message in str(error) for message in _MESSAGES):
        return True
    before = error.__cause__ or error.__context__  # torch.save raises another error when it closes what it has begun
    return before is not None and is_out_of_memory(before)


@contextlib.contextmanager
def advised(advice: str) -> Iterator[None]:
    """Add the advice to an error of the body, if it says that memory is short."""
    try:
        yield
    except BaseException as error:
        if is_out_of_memory(error):
            add_note(error, f"this process is out of memory: {advice}")
        raise


def advice_for_pipeline(zero: int, replicas: int, stages: int) -> str:
    """Return which options of add_pipeline need less memory than these."""
    most = 3 if stages == 1 else 1
    found = [f"zero={zero + 1}{' or more' if zero + 1 < most else ''}"] if zero < most else []
    if found and replicas == 1:
        found = [f"{found[0]} with replicas=2 or more"]
    found += [f"stages={stages + 1} or more", 'recompute="full"', "more microbatches"]
    return f"add_pipeline({', '.join(found[:-1])} or {found[-1]}) needs less; pp.memory says how much, before a launch"


ADVICE_FOR_REPLICAS = (
    "replica.optimizer(…, zero=1), or replica.shard(model, zero=3), keeps a part of the state in each worker; "
    "replica.shards(…, microbatches=) with more of them needs less for activations"
)
