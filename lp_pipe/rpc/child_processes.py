"""The script's classes and functions in processes that a node starts with multiprocessing."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lp_pipe.rpc import codec, main_module

if TYPE_CHECKING:
    from multiprocessing.reduction import ForkingPickler


def enter_node(facts_there: Mapping[str, str]) -> None:
    """Make this process a node's: names of the script go into its `__main__`, and its child processes get them too."""
    from multiprocessing.reduction import ForkingPickler  # the template of nodes has loaded it already

    main_module.become_main(facts_there)
    ForkingPickler.reducer_override = _reduced_for_child  # type: ignore[method-assign, assignment]
    _keep_spawned_children_from_the_script()


def _keep_spawned_children_from_the_script() -> None:
    """Keep children that multiprocessing spawns from running the script, which would launch the program again."""
    from multiprocessing import spawn

    if hasattr(spawn.get_preparation_data, "_lp_pipe_original"):
        return
    original = spawn.get_preparation_data

    def get_preparation_data(name: str) -> dict[str, Any]:
        data = original(name)
        return {key: value for key, value in data.items() if not key.startswith("init_main_from_")}

    get_preparation_data._lp_pipe_original = original  # type: ignore[attr-defined]
    spawn.get_preparation_data = get_preparation_data


def _reduced_for_child(pickler: "ForkingPickler", obj: Any) -> Any:
    """Reduce objects of these modules for multiprocessing: a child that is not forked has none of the modules."""
    if main_module.has_travelled(obj):
        return _arrive_in_child, (main_module.facts(), codec.dumps(obj))
    return NotImplemented


def _arrive_in_child(facts_there: dict[str, str], data: bytes) -> Any:
    if not main_module.is_node():
        enter_node(facts_there)
    return codec.loads(data)
