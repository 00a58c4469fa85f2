"""Set up logging in nodes as in the script: levels, handlers, formats and filters of all loggers.

Handlers are sent as their class and attributes. A stream that is this process's stdout or stderr becomes the node's
own. A log file is opened again, to append. A handler that cannot be sent (its stream is in memory, it holds a
connection or a lock) is replaced by one that writes to stderr.
"""

import contextlib
import fcntl
import logging
import os
import sys
import sysconfig
from dataclasses import dataclass
from typing import Any

from lp_pipe.private_python import open_log_file, takes_warnings
from lp_pipe.rpc import codec

_log = logging.getLogger(__name__)

_STREAMS = {"stdout": 1, "stderr": 2}
_NOT_SENT = ("lock", "_closed")  # attributes that the new handler in each process has by itself
_ABSL = "absl.logging"
_held_level: int | None = None


@dataclass(frozen=True)
class _StandardStream:
    name: str


@dataclass(frozen=True)
class _HandlerState:
    kind: type[logging.Handler]
    attributes: dict[str, Any]


@dataclass(frozen=True)
class _AbslHandler:
    """absl's one handler, which every process creates by itself.

    formatter: None for absl's own.
    """

    formatter: logging.Formatter | None


@dataclass(frozen=True)
class _LoggerState:
    """The configuration of one logger.

    handlers: positions in the list of all handlers, since loggers may share one. filters: pickled.
    is_plain: whether the logger is of the class that `logging.getLogger` creates.
    """

    is_plain: bool
    level: int
    propagate: bool
    disabled: bool
    handlers: tuple[int, ...]
    filters: bytes


@dataclass(frozen=True)
class LoggingState:
    """The logging configuration of a process.

    loggers: by name, "" for the root; only those that were configured.
    handlers: pickled, each by itself. logger_class: from `logging.setLoggerClass`, pickled.
    held_level: from `set_level`, if it was called.
    last_resort: the level and the formatter of `logging.lastResort`.
    """

    loggers: dict[str, _LoggerState]
    handlers: tuple[bytes, ...]
    logger_class: bytes
    held_level: int | None
    disabled: int
    level_names: dict[int, str]
    takes_warnings: bool
    last_resort: tuple[int, logging.Formatter | None] | None


def capture() -> LoggingState:
    """Return the logging configuration of this process, for `restore`."""
    packing = _Packing()
    loggers = {"": logging.root, **{name: one for name, one in _loggers().items() if _is_configured(one)}}
    states = {name: packing.state_of(name, logger) for name, logger in loggers.items()}
    last = logging.lastResort
    return LoggingState(
        states,
        tuple(packing.handlers),
        codec.dumps(logging.getLoggerClass()),
        _held_level,
        logging.root.manager.disable,
        {level: logging.getLevelName(level) for level in logging.getLevelNamesMapping().values()},
        takes_warnings(),
        None if last is None else (last.level, last.formatter),
    )


def restore(state: LoggingState) -> None:
    """Set up logging as in the script, in a node's process."""
    global _held_level
    _held_level = state.held_level
    for level, name in state.level_names.items():
        logging.addLevelName(level, name)
    with contextlib.suppress(Exception):  # its module is missing on this host
        logging.setLoggerClass(codec.loads(state.logger_class))
    handlers = [_load_handler(packed) for packed in state.handlers]
    for name, one in state.loggers.items():
        if not one.is_plain and name not in logging.root.manager.loggerDict:
            continue  # a library creates this logger, of its own class, when it is imported
        logger = logging.getLogger(name)
        for handler in (handlers[place] for place in one.handlers):
            _add_handler(logger, handler)
        logger.setLevel(one.level)  # after the handlers, because adding absl's changes the root's level
        logger.propagate, logger.disabled = one.propagate, one.disabled
        with contextlib.suppress(Exception):  # their class is missing on this host
            logger.filters[:] = codec.loads(one.filters)
    logging.disable(state.disabled)
    if state.takes_warnings:
        logging.captureWarnings(True)
    if state.last_resort is None:
        logging.lastResort = None
    elif logging.lastResort is not None:
        logging.lastResort.setLevel(state.last_resort[0])
        logging.lastResort.setFormatter(state.last_resort[1])


def set_level(level: int) -> None:
    """Show messages from `level` on, of all loggers without a level of their own, and of absl.

    Adds no handler, so that the program's own set-up still finds none.
    """
    global _held_level
    _held_level = level
    logging.root.setLevel(level)
    if logging.lastResort is not None:
        logging.lastResort.setLevel(level)
        logging.lastResort.setFormatter(logging.Formatter(logging.BASIC_FORMAT))
    with contextlib.suppress(ImportError):
        from absl import logging as absl_logging

        absl_logging.set_verbosity(logging.getLevelName(level))


def hold_level() -> None:
    """Set the level of `set_level` again in a node's process, after imported modules may have changed it."""
    if _held_level is not None:
        set_level(_held_level)


class _Packing:
    """Pickles the states of loggers' handlers, each handler once."""

    def __init__(self) -> None:
        self.handlers: list[bytes] = []
        self._places: dict[logging.Handler, int] = {}

    def state_of(self, name: str, logger: logging.Logger) -> _LoggerState:
        try:
            filters = codec.dumps(list(logger.filters))
        except Exception as error:
            _log.warning(
                "the filters of logger %r are not applied in the nodes, because they do not pickle: %s", name, error
            )
            filters = codec.dumps([])
        handlers = [one for one in logger.handlers if not _does_nothing(one) and not _is_of_library(name, one)]
        places = tuple(dict.fromkeys(self._place_of(handler) for handler in handlers))
        is_plain = name == "" or type(logger) is logging.getLoggerClass()
        return _LoggerState(is_plain, logger.level, logger.propagate, logger.disabled, places, filters)

    def _place_of(self, handler: logging.Handler) -> int:
        if handler not in self._places:
            packed = _packed(handler)
            if packed not in self.handlers:  # all handlers that cannot be sent share one replacement
                self.handlers.append(packed)
            self._places[handler] = self.handlers.index(packed)
        return self._places[handler]


def _packed(handler: logging.Handler) -> bytes:
    try:
        return codec.dumps(_state_of(handler))
    except Exception as error:
        _log.info("nodes log to stderr instead of to %r, which cannot be sent to them: %s", handler, error)
    stand_in = logging.StreamHandler(sys.stderr)
    stand_in.setFormatter(logging.Formatter(logging.BASIC_FORMAT))
    return codec.dumps(_state_of(stand_in))


def _state_of(handler: logging.Handler) -> _HandlerState | _AbslHandler:
    if type(handler).__module__ == _ABSL:
        formatter = getattr(handler, "python_handler", handler).formatter
        return _AbslHandler(formatter if type(formatter).__module__ != _ABSL else None)
    attributes = {name: value for name, value in vars(handler).items() if name not in _NOT_SENT}
    attributes["filters"] = [one for one in handler.filters if not isinstance(one, _UnlessRepeated)]
    if isinstance(handler, logging.FileHandler):
        if handler.stream is not None:  # this process must append, too, or it would overwrite the nodes' lines
            flags = fcntl.fcntl(handler.stream.fileno(), fcntl.F_GETFL)
            fcntl.fcntl(handler.stream.fileno(), fcntl.F_SETFL, flags | os.O_APPEND)
        attributes |= {"stream": None, "mode": "a"}
    elif isinstance(handler, logging.StreamHandler):
        attributes["stream"] = _standard_stream(handler.stream)
    nested = {name: _state_of(value) for name, value in attributes.items() if isinstance(value, logging.Handler)}
    return _HandlerState(type(handler), attributes | nested)


def _standard_stream(stream: Any) -> _StandardStream:
    """Return which standard stream of this process the stream is.

    Raises:
        ValueError: it is another stream.
    """
    for name, number in _STREAMS.items():
        if stream in (getattr(sys, name), getattr(sys, f"__{name}__")):
            return _StandardStream(name)
        with contextlib.suppress(Exception):
            if stream.fileno() == number:
                return _StandardStream(name)
    raise ValueError(f"its stream must be stdout or stderr, got {stream!r}")


def _load_handler(packed: bytes) -> logging.Handler:
    try:
        return _made(codec.loads(packed))
    except Exception as error:
        _log.warning(
            "log lines of this node go to stderr, because a handler of the script cannot be created here: %s", error
        )
        return logging.StreamHandler()


def _made(state: _HandlerState | _AbslHandler) -> logging.Handler:
    if isinstance(state, _AbslHandler):
        from absl import logging as absl_logging

        absl: logging.Handler = absl_logging.get_absl_handler()
        if state.formatter is not None:
            absl.setFormatter(state.formatter)
        return absl
    handler = state.kind.__new__(state.kind)
    logging.Handler.__init__(handler)
    for name, value in state.attributes.items():
        if isinstance(value, _StandardStream):
            value = getattr(sys, value.name)
        vars(handler)[name] = _made(value) if isinstance(value, _HandlerState | _AbslHandler) else value
    handler.name = state.attributes.get("_name")  # also registers it under its name
    if isinstance(handler, logging.FileHandler) and not handler.delay:
        open_log_file(handler)
    return handler


def _add_handler(logger: logging.Logger, handler: logging.Handler) -> None:
    if type(handler).__module__ == _ABSL:
        from absl import logging as absl_logging

        absl_logging.use_absl_handler()
        return
    repeated = _UnlessRepeated(logger, handler)
    if repeated.allows():  # otherwise an imported library has already added such a handler
        handler.addFilter(repeated)
        logger.addHandler(handler)


class _UnlessRepeated:
    """A filter for a handler from the script that drops records if the node's own code has added an equal handler.

    A module that the node imports may set up its logger again, as it did in the script. Its lines then appear once.
    """

    def __init__(self, logger: logging.Logger, handler: logging.Handler) -> None:
        self._logger = logger
        self._handler = handler

    def allows(self) -> bool:
        return not any(self._is_repeated_by(one) for one in self._logger.handlers)

    def filter(self, record: logging.LogRecord) -> bool:
        return self.allows()

    def _is_repeated_by(self, other: logging.Handler) -> bool:
        is_from_script = any(isinstance(one, _UnlessRepeated) for one in other.filters)
        is_alike = type(other).__qualname__ == type(self._handler).__qualname__
        return is_alike and not is_from_script and _place(other) == _place(self._handler)


def _place(handler: logging.Handler) -> Any:
    return getattr(handler, "baseFilename", None) or getattr(handler, "stream", None)


def _loggers() -> dict[str, logging.Logger]:
    known = list(logging.root.manager.loggerDict.items())
    return {name: one for name, one in known if isinstance(one, logging.Logger)}


def _is_configured(logger: logging.Logger) -> bool:
    return bool(logger.level or logger.handlers or logger.filters or logger.disabled or not logger.propagate)


def _does_nothing(handler: logging.Handler) -> bool:
    return isinstance(handler, logging.NullHandler) or getattr(handler, "baseFilename", "") == os.devnull


def _is_of_library(name: str, handler: logging.Handler) -> bool:
    """Return whether an installed library has added the handler to its own logger, as it does at each import."""
    if not name or isinstance(handler, logging.FileHandler):
        return False
    file = getattr(sys.modules.get(name.partition(".")[0]), "__file__", None)
    paths = sysconfig.get_paths()
    return bool(file) and str(file).startswith((paths["purelib"], paths["platlib"], paths["stdlib"]))
