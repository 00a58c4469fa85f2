"""Load the Program that a TARGET on the command line names: `path/file.py[:name]` or `package.module[:name]`."""

import importlib
import importlib.machinery
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from lp_pipe.cli.errors import DONE, WRONG_USAGE, NotLaunched, UsageError, nearest
from lp_pipe.cli.program_flags import Flags, MakerFlags, hand_over, were_read
from lp_pipe.launch.refusal import launches_refused
from lp_pipe.program import Program
from lp_pipe.programs.torch_script import Script, make_program
from lp_pipe.telemetry.sink_threads import Sink
from lp_pipe.telemetry.sinks import SINKS
from lp_pipe.telemetry.tracebacks import fold_traceback

DEFAULT_NAMES = ("program", "make_program")
# Without this refusal every node process would import the file and launch the program again, and so on.
_LAUNCHES = (
    "lp_pipe imports this file for its program and launches it itself: "
    'put the file\'s own launch below `if __name__ == "__main__":`'
)
_CALL_LAUNCHES = "lp_pipe calls {} for its program and launches it itself: give a function that only returns it"
_MAIN_GUARD = re.compile(r"^if\s+__name__\s*==", re.MULTILINE)


class TargetName(NamedTuple):
    """A parsed TARGET. place: a file or the name of a module. name: "" for the default names."""

    place: str
    name: str

    @classmethod
    def parse(cls, text: str) -> "TargetName":
        place, colon, name = text.rpartition(":")
        return cls(place, name) if colon else cls(text, "")

    @property
    def is_file(self) -> bool:
        return "/" in self.place or self.place.endswith(".py")


def load_program(text: str, program_flags: Sequence[str]) -> Program:
    """Import the target, give it its flags, and return its program.

    sys.argv becomes [file, *program_flags]. If the target is a function, its parameters are flags. If the target has
    loaded absl.flags, other flags are parsed by absl.

    Raises:
        UsageError: there is no such file, module or name, it is no program, or it does not take a flag.
        NotLaunched: the target's own code raised.
    """
    loaded = _load(text, program_flags)
    return loaded.made(loaded.found, ()) if loaded.values is not None else loaded.checked(loaded.found)


def load_maker(text: str, program_flags: Sequence[str]) -> Callable[[int], Program]:
    """Return a function that makes the target's program for a number of hosts; the target must take that number.

    Raises: as `load_program`, here and when the function is called.
    """
    loaded = _load(text, program_flags, num_given=1)
    if loaded.values is None or not _takes(loaded.found, 1, **loaded.values):
        raise UsageError(f"{loaded.place}: --elastic needs a function that takes the number of hosts")
    return lambda num_hosts: loaded.made(loaded.found, (num_hosts,))


def load_ranks(text: str, program_flags: Sequence[str], num_per_host: int) -> Callable[[int], Program]:
    """Return a function that makes the program of a torchrun script's ranks for a number of hosts.

    Raises:
        UsageError: there is no such file or module.
        NotLaunched: the file is no valid Python.
    """
    target = TargetName.parse(text)
    if target.name:
        raise UsageError(f"{text}: with --nproc the target must be a whole script: leave :{target.name} out")
    found = _find_file(target) if target.is_file else _find_module(text, target)
    if target.is_file:
        script = _guarded(text, lambda: Script.of_file(found, program_flags))
    else:
        script = Script(tuple(program_flags), module=target.place)
    return lambda num_hosts: make_program(script, num_per_host, num_hosts)


@dataclass(frozen=True)
class _Loaded:
    """A program or the function that makes it, with its flags.

    values: by parameter of the function; None for a Program. unknown: flags that match no parameter and no absl flag.
    """

    text: str
    place: str
    module: ModuleType
    found: Any
    maker: MakerFlags
    values: dict[str, Any] | None
    unknown: Sequence[str]

    def made(self, function: Callable[..., Any], arguments: Sequence[Any]) -> Program:
        """Call the function for its program."""
        values = self.values or {}
        if not _takes(function, *arguments, **values):
            raise UsageError(f"{self.place} has parameters that cannot be flags: give them defaults")
        with launches_refused(_CALL_LAUNCHES.format(self.place)):
            made = _guarded(self.text, lambda: function(*arguments, **values))
        if not isinstance(made, Program):
            raise UsageError(f"{self.place} must return a Program, but returned {type(made).__name__}")
        return self.checked(made)

    def checked(self, program: Program) -> Program:
        """Return the program after checking that its flags were read; else raise or print a warning."""
        if self.unknown and not were_read():
            if {"--help", "-h"} & set(self.unknown) or self.maker.names or not _may_read_later(self.module):
                self.maker.refuse(self.unknown)
            flags = " ".join(self.unknown)
            print(f"lp_pipe: {self.text} has not read its flags: {flags}", file=sys.stderr)
        return program


def load_sink(text: str) -> Sink:
    """Return the sink of `--sink=tensorboard`, `mlflow:URI`, `wandb:PROJECT` or the place of a function.

    Raises:
        UsageError, NotLaunched: as `load_function`; the sink's package is missing, or its argument.
    """
    name, _, argument = text.partition(":")
    if name not in SINKS:
        if ":" not in text:
            hint = nearest(name, SINKS)
            raise UsageError(f"--sink={text}: no such sink{hint} (sinks: {', '.join(SINKS)}, or module:function)")
        return load_function(text, "--sink")
    needed = list(inspect.signature(SINKS[name]).parameters)[:1]
    if bool(argument) != bool(needed):
        raise UsageError(f"--sink={text}: write {':'.join(['--sink=' + name, *map(str.upper, needed)])}")
    try:
        return SINKS[name](*[argument] * len(needed))
    except ImportError as error:
        raise UsageError(f"--sink={text}: {error}") from None


def load_function(text: str, option: str) -> Callable[..., Any]:
    """Return the function that an option such as `--setup=module:function` names, or `path/file.py:function`.

    Raises:
        UsageError: there is no such file, module or function.
        NotLaunched: the module's own code raised.
    """
    target = TargetName.parse(text)
    if not target.name:
        raise UsageError(f"{option}={text}: give a function, as {option}=module:function")
    file = _find_file(target) if target.is_file else _find_module(text, target)
    known = [one for one in list(sys.modules.values()) if getattr(one, "__file__", None) == str(file)]
    load = (lambda: _import_file(file)) if target.is_file else (lambda: importlib.import_module(target.place))
    module = known[0] if target.is_file and known else _guarded(text, load)
    found: Callable[..., Any] | None = getattr(module, target.name, None)
    if found is None or not callable(found):
        hint = nearest(target.name, vars(module))
        raise UsageError(f"{option}={text}: {target.place} has no function {target.name!r}{hint}")
    return found


def _load(text: str, program_flags: Sequence[str], num_given: int = 0) -> _Loaded:
    target = TargetName.parse(text)
    hand_over(target.place, program_flags)
    with launches_refused(_LAUNCHES):
        file = _find_file(target) if target.is_file else _find_module(text, target)
        sys.argv[0] = str(file)
        module = _guarded(text, lambda: _import_file(file) if target.is_file else importlib.import_module(target.place))
    name, found = _find_name(target, module)
    maker = MakerFlags(text, found, num_given, _absl_names())
    is_program = isinstance(found, Program)
    if {"--help", "-h"} & set(program_flags) and (maker.names or "absl.flags" in sys.modules):
        _print_flags(text, module, maker)
        raise SystemExit(0)
    flags = Flags({}, list(program_flags)) if is_program else maker.parse(program_flags)
    unknown = _without_absl(text, flags.unknown, maker)
    values = None if is_program else {**flags.values, **maker.given_to_absl()}
    place = f"{target.place}:{name}"
    return _Loaded(text, place, module, found, maker, values, unknown)


def _find_file(target: TargetName) -> Path:
    path = Path(target.place)
    if path.is_file():
        if not path.name.endswith(tuple(importlib.machinery.all_suffixes())):
            raise UsageError(f"{path} is no Python file: its name must end in .py")
        return path.resolve()
    if path.is_dir():
        raise UsageError(f"{path} is a folder; name a Python file in it, such as {path}/program.py")
    siblings = [str(path.with_name(other.name)) for other in path.parent.glob("*.py")]
    raise UsageError(f"no file {target.place!r}{nearest(target.place, siblings)}")


def _find_module(text: str, target: TargetName) -> Path:
    """Return the module's file; imports the packages that contain it."""
    sys.path.insert(0, str(Path.cwd()))
    is_name = all(part.isidentifier() for part in target.place.split("."))
    spec = _guarded(text, lambda: _spec(target.place)) if is_name else None
    if (spec is None or spec.origin is None) and Path(target.place).exists():
        return _find_file(target)  # raises the error that fits
    if spec is None:
        file = f"{target.place}.py"
        hint = f"; did you mean {file!r}?" if Path(file).is_file() else "; a file is given as path/file.py"
        raise UsageError(f"no module {target.place!r}{hint}")
    return Path(spec.origin or target.place)


def _spec(module: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(module)
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):  # its package imports another one
            raise
        return None


def _import_file(file: Path) -> ModuleType:
    """Import a file under its stem, so that node processes, which get this sys.path, find it by name.

    Where the stem is taken (random.py), its folder comes last on sys.path, so that it hides nothing, and the module
    gets a name of its own; what nodes need of it then travels by value.
    """
    name, folder = file.stem, str(file.parent)
    if name.isidentifier() and name not in sys.modules and name not in sys.stdlib_module_names:
        sys.path.insert(0, folder)
        return importlib.import_module(name)
    sys.path.append(folder)
    name = f"lp_pipe_target_{name}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None, "a .py file has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _absl_names() -> set[str]:
    """Return the absl flags that the target or a module that it imports has defined, without absl's own."""
    absl_flags = sys.modules.get("absl.flags")
    if absl_flags is None:
        return set()
    owners = {name: str(absl_flags.FLAGS.find_module_defining_flag(name)) for name in absl_flags.FLAGS}
    return {name for name, owner in owners.items() if not owner.startswith("absl.")}


def _print_flags(text: str, module: ModuleType, maker: MakerFlags) -> None:
    if maker.names:
        print(maker.help())
    if _absl_names():
        print(f"flags of {text}, given after `--`:\n{sys.modules['absl.flags'].FLAGS.module_help(module)}")


def _without_absl(text: str, flags: Sequence[str], maker: MakerFlags) -> Sequence[str]:
    """Parse the flags with absl, if it is loaded; return the flags that remain."""
    absl_flags = sys.modules.get("absl.flags")
    if absl_flags is None:
        return flags
    try:
        absl_flags.FLAGS([text, *flags])
    except absl_flags.UnrecognizedFlagError as error:
        if maker.names:
            maker.refuse([flag for flag in flags if flag.lstrip("-").partition("=")[0] not in absl_flags.FLAGS])
        raise UsageError(f"{text}: {error}; `-- --help` lists the program's flags") from error
    except absl_flags.Error as error:
        raise UsageError(f"{text}: {error}; `-- --help` lists the program's flags") from error
    if "absl.app" in sys.modules:  # absl.app.run, which the target's own launch would call, also does this
        from absl import logging as absl_logging

        absl_logging.use_absl_handler()
        if absl_flags.FLAGS["verbosity"].using_default_value:
            absl_logging.set_verbosity(absl_logging.INFO)
    return ()


def _may_read_later(module: ModuleType) -> bool:
    """Return whether the target's nodes may read its flags: its source mentions sys.argv or a parser."""
    try:
        source = inspect.getsource(module)
    except (OSError, TypeError):  # there is no source
        return True
    return "argv" in source or "parse_args" in source


def _find_name(target: TargetName, module: ModuleType) -> tuple[str, Any]:
    """Return the name and the program or function that it names."""
    names = (
        [target.name]
        if target.name
        else [name for name in DEFAULT_NAMES if not isinstance(getattr(module, name, module), ModuleType)]
    )
    if not names or not hasattr(module, names[0]):
        raise UsageError(_no_such_name(target, module))
    found = getattr(module, names[0])
    if isinstance(found, Program):
        return names[0], found
    if wrong := _no_maker(found):
        raise UsageError(f"{target.place}:{names[0]} is {wrong}, not a Program or a function that returns one")
    return names[0], found


def _no_maker(found: object) -> str:
    """Return what `found` is if it cannot make a program; "" if it can."""
    if isinstance(found, type):
        return "a class"
    if inspect.iscoroutinefunction(found):
        return "async def"
    return "" if callable(found) else f"of type {type(found).__name__}"


def _no_such_name(target: TargetName, module: ModuleType) -> str:
    own = {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_")
        and getattr(value, "__module__", None) == module.__name__
        and not isinstance(value, type)
    }
    known = [name for name, value in vars(module).items() if isinstance(value, Program) or name in own]
    programs = [name for name, value in vars(module).items() if isinstance(value, Program)]
    if target.name:
        return f"{target.place} has no {target.name!r}{nearest(target.name, known) or _below_main(module)}"
    if programs:
        names = f"{len(programs)} programs" if len(programs) > 1 else "a program of another name"
        return f"{target.place} has {names}; name one: {' or '.join(f'{target.place}:{name}' for name in programs)}"
    hint = _for_torchrun(target) or _below_main(module) or f"; name yours: {target.place}:NAME"
    return f"{target.place} has neither `program` nor `make_program`{hint}"


def _below_main(module: ModuleType) -> str:
    """Return a hint if the file has code that only runs when it is a script."""
    try:
        has_guard = _MAIN_GUARD.search(inspect.getsource(module))
    except (OSError, TypeError):  # there is no source
        has_guard = None
    why = '; code below `if __name__ == "__main__":` does not run here: make the program above it, or in a function'
    return why if has_guard else ""


def _takes(function: Callable[..., Any], *arguments: Any, **values: Any) -> bool:
    try:
        inspect.signature(function).bind(*arguments, **values)
    except TypeError:
        return False
    except ValueError:  # the function has no signature: the call itself decides
        return True
    return True


def _guarded(text: str, user_code: Callable[[], Any]) -> Any:
    try:
        return user_code()
    except Exception as error:
        raise NotLaunched(own_failure(text, error)) from error
    except SystemExit as error:
        if isinstance(error, KeyboardInterrupt) or _has_answered(error):
            raise
        raise NotLaunched(own_failure(text, error)) from error


def _has_answered(error: SystemExit) -> bool:
    """Return whether the target exits because of its flags: after --help, or after a wrong flag."""
    return error.code == WRONG_USAGE or (len(sys.argv) > 1 and error.code in (None, DONE))


def own_failure(text: str, error: BaseException) -> str:
    """Return the message about an error in the target's own code: one line, and the frames of that code below it."""
    full = "".join(traceback.format_exception(error))
    frames = [line for line in fold_traceback(full, Path.cwd()) if not line.startswith("  …")]
    said = "".join(f": {line}" for line in str(error).splitlines()[:1])
    hint = _as_module(text, error) or _for_torchrun(TargetName.parse(text))
    return "\n  ".join([f"{text} raised {type(error).__name__}{said}{hint}", *frames])


def _for_torchrun(target: TargetName) -> str:
    """Return a hint if the target is a script for torchrun."""
    try:
        is_rank = target.is_file and b"init_process_group" in Path(target.place).read_bytes()
    except OSError:
        return ""
    return f"; a script for torchrun: lp_pipe launch --nproc=2 {target.place}" if is_rank else ""


def _as_module(text: str, error: BaseException) -> str:
    """Return a hint to give the target as a module, if its relative imports need its package."""
    file = Path(TargetName.parse(text).place)
    if "relative import" not in str(error) or file.suffix != ".py" or file.is_absolute() or ".." in file.parts:
        return ""
    return f"; give it as a module: {'.'.join(file.with_suffix('').parts)}"
