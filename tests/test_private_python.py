"""Behaviour where Python's standard library or cloudpickle has lost its private parts."""

import ast
import enum
import logging
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cloudpickle import cloudpickle

from lp_pipe import private_python
from lp_pipe.private_python import release_if_held_here
from lp_pipe.rpc import codec
from lp_pipe.rpc.classes import ClassReference

PRIVATE = re.compile(r"_(?!lp_pipe_)[A-Za-z]\w*")  # lp_pipe marks objects of others by names that begin with its own


def names_asked_for_in(module: Any) -> list[str]:
    """Return the private names that the module looks up: its string constants."""
    tree = ast.parse(Path(module.__file__).read_text())
    constants = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return sorted({value for value in constants if isinstance(value, str) and PRIVATE.fullmatch(value)})


def without(*lost: str) -> Callable[..., Any]:
    """Return a getattr for which objects lack these names. torch itself still has them, and uses them."""

    def look_up(owner: Any, name: str, *default: Any) -> Any:
        return getattr(owner, "lost" if name in lost else name, *default)

    return look_up


@pytest.fixture
def lost(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Take private names away from lp_pipe: those that are given, or all."""

    def lose(*names: str) -> None:
        look_up = without(*(names or names_asked_for_in(private_python)))
        monkeypatch.setattr(private_python, "getattr", look_up, raising=False)

    return lose


@pytest.mark.parametrize("make", [threading.RLock, threading.Condition])
def test_a_thread_knows_which_locks_it_holds(lost: Callable[..., None], make: Callable[[], Any]) -> None:
    lost()
    lock = make()
    assert not private_python.is_held_here(lock)
    with lock:
        assert private_python.is_held_here(lock)
        elsewhere: list[bool] = []
        thread = threading.Thread(target=lambda: elsewhere.append(private_python.is_held_here(lock)))
        thread.start()
        thread.join()
        assert elsewhere == [False]
        lock.acquire()
        release_if_held_here(lock)
        assert not private_python.is_held_here(lock)
        lock.acquire()


@pytest.mark.parametrize("names", [(), ("_DYNAMIC_CLASS_TRACKER_BY_ID",), ("_make_skeleton_class",)])
def test_classes_travel_by_value_and_stay_themselves(lost: Callable[..., None], names: tuple[str, ...]) -> None:
    lost(*names)

    class Color(enum.IntEnum):
        RED = 1

    class Plain:
        def __init__(self, color: Color) -> None:
            self.color = color

    back = codec.loads(codec.dumps(Plain(Color.RED)))
    assert type(back) is Plain
    assert back.color is Color.RED
    assert codec.loads(codec.dumps(ClassReference(Plain))) is Plain


def test_classes_of_another_process_are_made_once_in_a_tracker_of_lp_pipe_s_own(lost: Callable[..., None]) -> None:
    lost("_DYNAMIC_CLASS_TRACKER_BY_ID")

    class Color(enum.IntEnum):
        RED = 1

    class Kept: ...

    data = codec.dumps([Color.RED, Kept()])
    for kind in (Color, Kept):  # as in a process that has never had them
        del private_python._own_classes[private_python._own_ids.pop(kind)]
    (first, kept), (second, kept_again) = codec.loads(data), codec.loads(data)
    assert (int(first), first.name, type(first) is Color) == (1, "RED", False)
    assert second is first
    assert type(kept) is type(kept_again) is not Kept


@pytest.mark.parametrize("kind", [enum.Enum, enum.IntEnum, enum.StrEnum, enum.Flag, enum.IntFlag])
def test_the_data_type_of_an_enum_is_found(lost: Callable[..., None], kind: Any) -> None:
    made = kind("Made", ["A", "B"])
    expected = private_python.data_type_of(made)
    lost()
    assert private_python.data_type_of(made) is expected


def test_a_log_file_is_opened_with_its_first_line(lost: Callable[..., None], tmp_path: Any) -> None:
    lost()
    handler = logging.FileHandler(tmp_path / "log", delay=True)
    private_python.open_log_file(handler)
    handler.emit(logging.makeLogRecord({"msg": "first"}))
    handler.close()
    assert (tmp_path / "log").read_text() == "first\n"


def test_cloudpickle_still_has_what_is_asked_for() -> None:
    of_cloudpickle = [
        name
        for name in names_asked_for_in(private_python)
        if name.startswith(("_DYNAMIC", "_make", "_get_or", "_lookup"))
    ]
    assert len(of_cloudpickle) == 5
    assert all(hasattr(cloudpickle, name) for name in of_cloudpickle)
