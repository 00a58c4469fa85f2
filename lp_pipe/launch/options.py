"""The options of a launch. A new one is a line in `LaunchOptions`, and its help in the command line (cli/)."""

import inspect
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from lp_pipe.launch.engines import Engine, make_engine
from lp_pipe.telemetry.sink_threads import Sink

Given = ParamSpec("Given")
Options = TypeVar("Options", bound="LaunchOptions")
Subject = TypeVar("Subject")
Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """The keyword arguments of `launch`, which explains them, of `launch_elastic`, a dry run, and the command line.

    Raises:
        ValueError: grace or hang_after is no such number of seconds.
        TypeError: setup cannot be called.
    """

    grace: float = 5.0
    serialize_py_nodes: bool | None = None
    run_dir: str | os.PathLike[str] | None = None
    metrics_sinks: Sequence[Sink] = ()
    listed: bool | None = None
    hang_after: float | None = 60.0
    trace: bool = False
    otel: bool = False
    metrics_port: int | None = None
    setup: Callable[[], Any] | None = None
    # From here on for mode="multi_host".
    engine: str | Engine = "local"
    hosts: str | Sequence[str] = ""
    engine_options: Mapping[str, str] | None = None
    listen: str = ""
    interface: str = ""
    transport: str = "auto"
    join_timeout: float = 60.0
    host_timeout: float = 7.0
    sync: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        is_time = isinstance(self.hang_after, int | float) and 0 < self.hang_after < math.inf
        if self.hang_after is not None and not is_time:
            raise ValueError(f"hang_after={self.hang_after!r}: seconds are needed, more than 0; None for no reports")
        if self.setup is not None and not callable(self.setup):
            raise TypeError(f"setup={self.setup!r}: a function without parameters is needed")
        # Else the stop would fail half-way.
        if not isinstance(self.grace, int | float) or not 0 <= self.grace < math.inf:
            raise ValueError(f"grace={self.grace!r}: seconds are needed, 0 or more")

    @property
    def needs_hosts(self) -> bool:
        """Whether an option that only a run on several hosts can follow is given."""
        is_other = self.engine != "local" or self.transport != "auto"
        return bool(is_other or self.hosts or self.engine_options or self.listen or self.interface or self.sync)

    def make_engine(self) -> Engine:
        """Return the engine that the user gave or named.

        Raises:
            ValueError: there is none of that name, or it cannot read its hosts or options.
        """
        if isinstance(self.engine, Engine):
            return self.engine
        hosts = self.hosts if isinstance(self.hosts, str) else ",".join(self.hosts)
        return make_engine(self.engine, hosts, self.engine_options or {})


_NAMES = [option.name for option in fields(LaunchOptions)]
HOST_OPTIONS = _NAMES[_NAMES.index("engine") :]


def with_keywords(
    options: Callable[Given, Options],
) -> Callable[[Callable[[Subject, Options], Result]], Callable[Concatenate[Subject, Given], Result]]:
    """Return a decorator for a function of a subject and its options: it then takes the options as its own arguments.

    options: the class of the options; its constructor checks them.
    """

    def decorate(function: Callable[[Subject, Options], Result]) -> Callable[Concatenate[Subject, Given], Result]:
        own = inspect.signature(function)
        subject = next(iter(own.parameters.values()))
        parameters = [subject, *inspect.signature(options).parameters.values()]
        signature = own.replace(parameters=parameters)

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Result:
            given = signature.bind(*args, **kwargs).arguments
            return function(given.pop(subject.name), options(**given))  # type: ignore[call-arg]

        call.__signature__ = signature  # type: ignore[attr-defined]
        return call

    return decorate
