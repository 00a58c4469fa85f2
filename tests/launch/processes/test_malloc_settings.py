"""The settings of malloc for nodes, next to what the user has set."""

import pytest

from lp_pipe.launch.processes.template_process import malloc_environment


def test_the_users_other_tunables_stay() -> None:
    own = malloc_environment({})["GLIBC_TUNABLES"]
    assert "glibc.malloc.trim_threshold=536870912" in own.split(":")
    assert malloc_environment({"GLIBC_TUNABLES": "glibc.rtld.nns=4"}) == {"GLIBC_TUNABLES": f"glibc.rtld.nns=4:{own}"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MALLOC_ARENA_MAX", "4"),
        ("GLIBC_TUNABLES", "glibc.rtld.nns=4:glibc.malloc.check=3"),
        ("LD_PRELOAD", "libjemalloc.so"),
    ],
)
def test_who_has_set_malloc_up_has_the_word(name: str, value: str) -> None:
    assert malloc_environment({name: value}) == {}
