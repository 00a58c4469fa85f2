"""What glibc's malloc does in the processes of nodes, where every step takes again what the one before has freed."""

from collections.abc import Mapping

_VARIABLE = "GLIBC_TUNABLES"
_SETTINGS = {
    "trim_threshold": 1 << 29,  # so much freed memory is kept
    "mmap_threshold": 1 << 25,  # the most that every glibc takes; what is larger goes back to the kernel at once
    "top_pad": 1 << 26,  # by which it grows
    "arena_max": 1,  # for all threads: what was freed in one arena is of no use to another
    "hugetlb": 1,  # transparent huge pages, where the kernel gives them to who asks; glibc 2.35, others overlook it
}


def malloc_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """What to add to a new process's environment; nothing where the user has set malloc up himself.

    By default activations of a step go back to the kernel, which clears their pages when the next step touches them.
    And they lie, as the weights, in pages of 4 KiB: a core that has waited for its neighbour has forgotten where each
    of them is, and on a virtual machine to look that up takes two tables.
    """
    tunables = environment.get(_VARIABLE, "")
    is_named = any(name.startswith("MALLOC_") for name in environment)
    if is_named or "glibc.malloc" in tunables or "LD_PRELOAD" in environment:
        return {}
    own = [f"glibc.malloc.{name}={value}" for name, value in _SETTINGS.items()]
    return {_VARIABLE: ":".join([*([tunables] if tunables else []), *own])}
