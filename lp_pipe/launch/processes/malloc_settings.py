"""Settings of glibc's malloc for node processes, in which each step allocates again what the last one has freed."""

from collections.abc import Mapping

_VARIABLE = "GLIBC_TUNABLES"
_SETTINGS = {
    "trim_threshold": 1 << 29,  # bytes of freed memory that the process keeps
    "mmap_threshold": 1 << 25,  # the maximum of every glibc; larger blocks go back to the kernel at once
    "top_pad": 1 << 26,  # bytes by which the heap grows
    "arena_max": 1,  # memory freed in one arena could not be reused in another
    "hugetlb": 1,  # transparent huge pages, where the kernel allows madvise; older glibc than 2.35 ignores it
}


def malloc_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what to add to a new process's environment; nothing if the user has configured malloc.

    By default a step's activations go back to the kernel, which clears their pages when the next step touches them.
    And activations and weights are in pages of 4 KiB. After a wait for its neighbour a core's TLB has lost them, and on
    a virtual machine each lookup walks two page tables.
    """
    tunables = environment.get(_VARIABLE, "")
    is_named = any(name.startswith("MALLOC_") for name in environment)
    if is_named or "glibc.malloc" in tunables or "LD_PRELOAD" in environment:
        return {}
    own = [f"glibc.malloc.{name}={value}" for name, value in _SETTINGS.items()]
    return {_VARIABLE: ":".join([*([tunables] if tunables else []), *own])}
