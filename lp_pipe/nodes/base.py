"""The base of every node of a program: arguments, addresses, handles, and something to execute."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any, Generic, Self, TypeVar

from lp_pipe.address import Address
from lp_pipe.context import current_context
from lp_pipe.handles import Handle, check_arguments, declared_at, dereference, find_handles
from lp_pipe.nodes import user_code

HandleT = TypeVar("HandleT", bound=Handle[Any])


class Node(ABC, Generic[HandleT]):
    """A unit of the program: a callable and its arguments, run in a thread or process of its own.

    label, index: set when the node is added to a program.
    notes: short lines that pictures of the program show with it.
    planned_host: the host on which it starts, by name or by position; None: any.
    """

    label: str = ""
    index: int = 0
    notes: tuple[str, ...] = ()
    planned_host: int | str | None = None
    is_colocated: bool = False

    def __init__(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> None:
        if not callable(function):
            raise TypeError(f"{type(self).__name__}: {function!r} is not callable")
        self._function = function
        self._args = args
        self._kwargs = kwargs
        self._run_enabled = True
        self._declared = declared_at()
        if args or kwargs:  # without any, `configure` may still give them
            check_arguments(type(self).__name__, function, args, kwargs)
        self._addresses: list[Address] = []
        self._handles: list[HandleT] = []

    @property
    def addresses(self) -> list[Address]:
        """The addresses at which this node's servers listen."""
        return self._addresses

    @property
    def name(self) -> str:
        """The node's `label/index`, or its class before it was added to a program."""
        return f"{self.label}/{self.index}" if self.label else type(self).__name__

    def create_handle(self) -> HandleT:
        """Return a new handle of this node."""
        handle = self._new_handle()
        handle.node_name = self.name
        self._handles.append(handle)
        return handle

    def configure(self, /, *args: Any, **kwargs: Any) -> Self:
        """Replace the arguments, also after add_node: this is how cyclic graphs are made.

        Raises:
            TypeError: the constructor does not take them.
        """
        if args or kwargs:
            check_arguments(f"{type(self).__name__}.configure", self._function, args, kwargs)
        self._args = args
        self._kwargs = kwargs
        return self

    def disable_run(self) -> Self:
        """Execute as if the constructed object had no `run()`."""
        self._run_enabled = False
        return self

    def enable_run(self) -> Self:
        """Undo `disable_run`."""
        self._run_enabled = True
        return self

    def placed(self, label: str, index: int) -> None:
        """Set label and index; called by the program that takes this node in."""
        self.label = label
        self.index = index
        for handle in self._handles:
            handle.node_name = self.name

    def input_handles(self) -> Iterator[Handle[Any]]:
        """Yield the handles of other nodes (or its own) among the arguments, at any depth."""
        return find_handles([self._args, self._kwargs, self._function])

    def launch_parts(self) -> list[tuple[str, Any]]:
        """Return what travels to the node's process, each part with the name that an error gives it."""
        named = [(f"argument args[{index}]", arg) for index, arg in enumerate(self._args)]
        named += [(f"argument {name}", value) for name, value in self._kwargs.items()]
        return [*named, ("the function" if not isinstance(self._function, type) else "the class", self._function)]

    def check_arguments(self) -> None:
        """Refuse to start with arguments that the function or constructor does not take.

        Raises:
            TypeError: names the node, and the line that declared it.
        """
        hint = f"\nThe node was declared at {self._declared}; give the arguments there, or with .configure(...)."
        check_arguments(f"node {self.name}: {type(self).__name__}", self._function, self._args, self._kwargs, hint)

    def construct_apart(self) -> Any:
        """Build the object that it would run or serve in this process and outside of any run, for tools to inspect.

        Raises:
            ValueError: it needs handles of other nodes; their clients work only within a run.
        """
        for handle in self.input_handles():
            raise ValueError(f"node {self.name} needs a client of {handle.node_name}, which exists only in a run")
        args, kwargs = dereference((self._args, self._kwargs))
        return user_code.call(self._function, *args, **kwargs)

    @abstractmethod
    def execute(self) -> None:
        """Run the node, inside its own thread or process; returns when it is done."""

    @abstractmethod
    def _new_handle(self) -> HandleT: ...

    def _construct(self) -> Any:
        """Call the function or constructor with every handle and Deferred resolved.

        In a process of its own the node drops its arguments: weights and data sets must not stay beside what the
        constructed object makes of them.
        """
        args, kwargs = dereference((self._args, self._kwargs))
        node = current_context()
        if node is not None and node.owns_arguments:
            self._args, self._kwargs = (), {}
        return user_code.call(self._function, *args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_handles": []}  # handles that were given out stay with their users

    def __repr__(self) -> str:
        return f"{type(self).__name__}({getattr(self._function, '__qualname__', self._function)})"
