"""The part of a value that does not pickle: its path, as Python would write it, and its type."""

import dataclasses
import functools
import threading
from typing import Any

import pytest

from lp_pipe.rpc.pickle_errors import find_unpicklable, pickle_error

LOCK = threading.Lock()


@dataclasses.dataclass
class Config:
    lock: Any = None


class Thing:
    def __init__(self) -> None:
        self.inner = {"lock": LOCK}

    def method(self) -> None: ...


def capturing() -> Any:
    lock = LOCK
    return lambda: lock


def defaulting() -> tuple[Any, Any]:
    def by_place(lock: Any = LOCK) -> None: ...

    def by_name(*, lock: Any = LOCK) -> None: ...

    return by_place, by_name


class Stubborn:
    def __reduce__(self) -> Any:
        raise ValueError("I stay here")


def test_the_path_leads_to_the_culprit() -> None:
    culprit = find_unpicklable({"a": [1, LOCK]}, "args[0]")
    assert culprit is not None
    assert (culprit.path, culprit.type_name) == ("args[0]['a'][1]", "lock")
    assert "cannot pickle" in culprit.error


def test_what_pickles_has_no_culprit() -> None:
    assert find_unpicklable({"a": [1, lambda: 3]}, "args[0]") is None


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (LOCK, "x"),
        ((1, [LOCK]), "x[1][0]"),
        ({"k": {3: LOCK}}, "x['k'][3]"),
        (Config(LOCK), "x.lock"),
        (Thing(), "x.inner['lock']"),
        (Thing().method, "x.__self__.inner['lock']"),
        (functools.partial(print, 1, LOCK), "x.args[1]"),
        (functools.partial(print, file=LOCK), "x.keywords['file']"),
        (capturing(), "closure variable 'lock'"),
        ([capturing()], "x[0]: closure variable 'lock'"),
        (defaulting()[0], "default argument 0"),
        (defaulting()[1], "default argument 'lock'"),
        (type("Local", (), {"lock": LOCK}), "x.lock"),
        (Stubborn(), "x"),
        ([0, Stubborn()], "x[1]"),
    ],
    ids=list(range(15)),
)
def test_paths_through_everything(value: Any, path: str) -> None:
    culprit = find_unpicklable(value, "x")
    assert culprit is not None
    assert path in culprit.path


def test_cycles_and_depth_do_not_lead_astray() -> None:
    cyclic: list[Any] = [1]
    cyclic.append(cyclic)
    cyclic.append(LOCK)
    culprit = find_unpicklable(cyclic, "x")
    assert culprit is not None
    assert culprit.path == "x[2]"
    deep: Any = LOCK
    for _ in range(100):
        deep = [deep]
    assert find_unpicklable(deep, "x") is not None


def test_the_error_names_call_part_and_type() -> None:
    error = pickle_error("server/0.add()", [("args[0]", 1), ("config", Config(LOCK))], TypeError("?"))
    assert "server/0.add(): cannot pickle config.lock of type lock" in str(error)


def test_what_cannot_be_looked_at_is_the_culprit_itself() -> None:
    class Closed(dict[str, Any]):
        def items(self) -> Any:
            raise OSError("the file is closed")

    culprit = find_unpicklable([Closed(lock=LOCK)], "x")
    assert culprit is not None
    assert culprit.path == "x[0]"


def test_a_culprit_of_code_is_told_from_one_of_data() -> None:
    class Locked:
        lock = LOCK

    def uses_global() -> Any:
        return LOCK

    uses_global.__module__ = "__main__"  # or the function would go by name
    for value in [Locked, Locked(), [uses_global]]:
        culprit = find_unpicklable(value, "x")
        assert culprit is not None and culprit.type_name == "lock" and culprit.is_of_code
        assert "module" in culprit.code_hint
    for value in [LOCK, Thing(), capturing()]:
        culprit = find_unpicklable(value, "x")
        assert culprit is not None and not culprit.is_of_code and culprit.code_hint == ""


def test_a_value_that_is_nested_too_deeply_is_named_as_a_whole() -> None:
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    culprit = find_unpicklable({"tree": deep}, "x")
    assert culprit is not None
    assert culprit.path == "x" and "RecursionError" in culprit.error
