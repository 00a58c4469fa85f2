"""Launch a program: plan, start, supervise and stop its nodes."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lp_pipe.launch.launcher import launch as launch
from lp_pipe.launch.run import Run as Run
from lp_pipe.launch.run_dir import new_run_dir as new_run_dir

if TYPE_CHECKING:
    from lp_pipe.launch.elastic import ElasticRun as ElasticRun
    from lp_pipe.launch.elastic import launch_elastic as launch_elastic
else:  # lazy: the modules for several hosts take 0.1 s to import; hidden from type checkers, as in lp_pipe

    def __getattr__(name: str) -> Any:
        if name not in ("ElasticRun", "launch_elastic"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.elastic"), name)
