"""Apply the settings that a script has made for its process in the processes and threads of its nodes.

`SETTINGS` is the table of them; docs/nodes.md has the same table for users. A setting is read at `launch()`, and only
if the launching process has loaded the setting's module. A default value is not sent, so that no node imports a module
just for that.

Some settings belong to a thread (torch's default device, numpy's error state). They apply to every thread in which
lp_pipe runs a node's code: the node's own, those of its server, and those of a colocation. Threads that the node's code
starts begin with the defaults, as in any Python program.
"""

import contextlib
import importlib
import logging
import re
import sys
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any, NamedTuple

from lp_pipe import private_python
from lp_pipe.launch.plan import absl_flags, logging_state
from lp_pipe.rpc import codec

_log = logging.getLogger(__name__)

ThreadState = Callable[[], None]  # applies the settings of a thread to the calling thread


class _NoDefault:
    """Marks settings without a default, which are always sent."""


class Setting(NamedTuple):
    """A row of the table `SETTINGS`.

    module: the setting is read if this module is loaded. A node imports the module to apply the setting.
    capture: returns the value, given the module. apply: sets the value, given the module. default: is not sent.
    """

    name: str
    module: str
    capture: Callable[[Any], Any]
    apply: Callable[[Any, Any], object]
    default: Any = _NoDefault
    is_of_thread: bool = False


def _functions(module: str, getter: str, setter: str, default: Any = _NoDefault, is_of_thread: bool = False) -> Setting:
    """Make a setting from the module's two functions that get and set it."""
    return Setting(
        f"{module}.{setter}",
        module,
        lambda owner: attrgetter(getter)(owner)(),
        lambda owner, value: attrgetter(setter)(owner)(value),
        default,
        is_of_thread,
    )


def _attribute(module: str, path: str, default: Any = _NoDefault) -> Setting:
    """Make a setting from an attribute, such as `backends.cudnn.benchmark` of torch."""
    parent, _, name = path.rpartition(".")

    def apply(owner: Any, value: Any) -> None:
        setattr(attrgetter(parent)(owner) if parent else owner, name, value)

    return Setting(f"{module}.{path}", module, attrgetter(path), apply, default)


def _changed(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in defaults or defaults[name] != value}


# Standard library


def _locale(locale: Any) -> str | None:
    """Return the locale; None for Python's initial one, which is "C" but for LC_CTYPE, which is the host's."""
    others = (locale.LC_COLLATE, locale.LC_MONETARY, locale.LC_NUMERIC, locale.LC_TIME)
    is_as_always = all(locale.setlocale(category) == "C" for category in others)
    return None if is_as_always else locale.setlocale(locale.LC_ALL)


def _stack_size(threading: Any) -> int:
    size: int = threading.stack_size()  # also resets it to the default
    threading.stack_size(size)
    return size


def _umask(os_module: Any) -> int | None:
    """Return the mask, if it can be read without setting it for a moment, which would affect other threads."""
    with contextlib.suppress(OSError), open("/proc/self/status", encoding="ascii", errors="replace") as status:
        found = re.search(r"^Umask:\s*(\d+)", status.read(), re.MULTILINE)
        return int(found[1], 8) if found else None
    return None


def _enable_faulthandler(faulthandler: Any, is_enabled: bool) -> None:
    if is_enabled and not faulthandler.is_enabled():
        faulthandler.enable()


def _event_loop_policy(asyncio: Any) -> Any:
    """Return the class of the policy that the script has set; None if it has set none."""
    policy = private_python.event_loop_policy(asyncio)
    is_default = policy is None or type(policy).__module__.startswith("asyncio.")
    return None if is_default else type(policy)


def _decimal_context(decimal: Any) -> Any:
    context = decimal.getcontext().copy()
    context.clear_flags()
    return None if repr(context) == repr(decimal.Context()) else context


# torch adds the first and numpy the others at their import. They are no reason to import them.
_FILTERS_OF_LIBRARIES = ("torch.jit._trace.TracerWarning", "numpy.exceptions.RankWarning", "numpy.RankWarning")
_TEST_RUNNERS = ("pytest", "_pytest")  # their warnings and log handlers are not part of a program


def _warning_filters(warnings_module: Any) -> list[tuple[str, bytes]]:
    """Return each filter pickled by itself, with its category's name, so that one that does not pickle is left out."""
    found = []
    for one in warnings_module.filters:
        category = one[2]
        if category.__module__.partition(".")[0] not in _TEST_RUNNERS:
            with contextlib.suppress(Exception):
                found.append((f"{category.__module__}.{category.__qualname__}", codec.dumps(tuple(one))))
    return found


def _set_warning_filters(warnings_module: Any, packed: list[tuple[str, bytes]]) -> None:
    filters = []
    for name, data in packed:
        if name not in _FILTERS_OF_LIBRARIES or name.rpartition(".")[0] in sys.modules:
            with contextlib.suppress(Exception):  # its module is missing on this host
                filters.append(codec.loads(data))
    own = [one for one in warnings_module.filters if one not in filters]
    warnings_module.resetwarnings()  # also forgets which warnings were shown
    warnings_module.filters[:] = [*filters, *own]


# numpy and torch

_NUMPY_ERRORS = {"divide": "warn", "over": "warn", "under": "ignore", "invalid": "warn"}
_NUMPY_PRINTING = {
    **{"edgeitems": 3, "threshold": 1000, "floatmode": "maxprec", "precision": 8, "suppress": False, "linewidth": 75},
    **{"nanstr": "nan", "infstr": "inf", "sign": "-", "formatter": None, "legacy": False, "override_repr": None},
}
_TORCH_PRINTING = {"precision": 4, "threshold": 1000, "edgeitems": 3, "linewidth": 80, "sci_mode": None}
_FP32_PRECISION = {
    **{"backends": "none", "backends.cuda.matmul": "none", "backends.cudnn": "none", "backends.mkldnn": "none"},
    **{"backends.cudnn.conv": "tf32", "backends.cudnn.rnn": "tf32"},
    **{"backends.mkldnn.matmul": "none", "backends.mkldnn.conv": "none", "backends.mkldnn.rnn": "none"},
}


def _fp32_precision(torch: Any) -> dict[str, str]:
    """Return the precision by backend, where it is not the default. torch has these since 2.9."""
    found = {path: attrgetter(path)(torch) for path in _FP32_PRECISION}
    return {
        path: backend.fp32_precision
        for path, backend in found.items()
        if getattr(backend, "fp32_precision", _FP32_PRECISION[path]) != _FP32_PRECISION[path]
    }


def _set_fp32_precision(torch: Any, values: dict[str, str]) -> None:
    for path, value in values.items():
        attrgetter(path)(torch).fp32_precision = value


def _private_torch() -> Any:
    """Return the module lp_pipe.private_torch. It imports torch, which is loaded if these settings are read."""
    from lp_pipe import private_torch

    return private_torch


def _deterministic(torch: Any) -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _anomaly(torch: Any) -> tuple[bool, bool]:
    return torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()


SETTINGS = (
    Setting(
        "absl.flags", "absl.flags", lambda _: absl_flags.capture(), lambda _, value: absl_flags.restore(value), b""
    ),
    _functions(
        "absl.logging", "get_verbosity", "set_verbosity"
    ),  # before logging, since absl creates a logger of its own class
    Setting("logging", "logging", lambda _: logging_state.capture(), lambda _, value: logging_state.restore(value)),
    Setting("warnings.filters", "warnings", _warning_filters, _set_warning_filters),
    _functions("sys", "getrecursionlimit", "setrecursionlimit"),
    _functions("sys", "getswitchinterval", "setswitchinterval"),
    _functions("sys", "get_int_max_str_digits", "set_int_max_str_digits"),
    _attribute("sys", "dont_write_bytecode"),
    Setting("threading.stack_size", "threading", _stack_size, lambda module, value: module.stack_size(value), 0),
    Setting(
        "gc.disable", "gc", lambda gc: gc.isenabled(), lambda gc, value: gc.enable() if value else gc.disable(), True
    ),
    Setting("gc.set_threshold", "gc", lambda gc: gc.get_threshold(), lambda gc, value: gc.set_threshold(*value)),
    Setting("os.umask", "os", _umask, lambda os_module, value: os_module.umask(value), None),
    _functions("socket", "getdefaulttimeout", "setdefaulttimeout", None),
    Setting(
        "locale.setlocale",
        "locale",
        _locale,
        lambda locale, value: locale.setlocale(locale.LC_ALL, value),
        None,
    ),
    Setting("faulthandler.enable", "faulthandler", lambda module: module.is_enabled(), _enable_faulthandler, False),
    Setting(
        "multiprocessing.set_start_method",
        "multiprocessing",
        lambda module: module.get_start_method(allow_none=True),
        lambda module, value: module.set_start_method(value, force=True),
        None,
    ),
    Setting(
        "multiprocessing.current_process().authkey",
        "multiprocessing.process",
        lambda module: bytes(module.current_process().authkey),
        lambda module, value: setattr(module.current_process(), "authkey", value),
    ),
    Setting(
        "asyncio.set_event_loop_policy",
        "asyncio",
        _event_loop_policy,
        lambda asyncio, value: asyncio.set_event_loop_policy(value()),
        None,
    ),
    Setting(
        "decimal.setcontext",
        "decimal",
        _decimal_context,
        lambda decimal, value: decimal.setcontext(value.copy()),
        None,
        is_of_thread=True,
    ),
    Setting(
        "numpy.seterr",
        "numpy",
        lambda numpy: _changed(numpy.geterr(), _NUMPY_ERRORS),
        lambda numpy, value: numpy.seterr(**value),
        {},
        is_of_thread=True,
    ),
    _functions("numpy", "geterrcall", "seterrcall", None, is_of_thread=True),
    Setting(
        "numpy.set_printoptions",
        "numpy",
        lambda numpy: _changed(numpy.get_printoptions(), _NUMPY_PRINTING),
        lambda numpy, value: numpy.set_printoptions(**value),
        {},
        is_of_thread=True,
    ),
    Setting(
        "torch.set_default_dtype",
        "torch",
        lambda torch: str(torch.get_default_dtype()).removeprefix("torch."),
        lambda torch, value: torch.set_default_dtype(getattr(torch, value)),
        "float32",
    ),
    Setting(
        "torch.set_default_device",
        "torch",
        lambda _: _private_torch().default_device(),
        lambda torch, value: torch.set_default_device(value),
        None,
        is_of_thread=True,
    ),
    _functions("torch", "is_grad_enabled", "set_grad_enabled", True, is_of_thread=True),
    Setting(
        "torch.use_deterministic_algorithms",
        "torch",
        _deterministic,
        lambda torch, value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
        (False, False),
    ),
    _attribute("torch", "utils.deterministic.fill_uninitialized_memory", True),
    _functions("torch", "get_float32_matmul_precision", "set_float32_matmul_precision", "highest"),
    Setting("torch.backends.fp32_precision", "torch", _fp32_precision, _set_fp32_precision, {}),
    _attribute("torch", "backends.cudnn.enabled", True),
    _attribute("torch", "backends.cudnn.benchmark", False),
    _attribute("torch", "backends.cudnn.deterministic", False),
    _attribute("torch", "backends.cudnn.allow_tf32", True),
    _attribute("torch", "backends.cuda.matmul.allow_fp16_reduced_precision_reduction", True),
    _attribute("torch", "backends.cuda.matmul.allow_bf16_reduced_precision_reduction", True),
    _functions("torch", "backends.cuda.flash_sdp_enabled", "backends.cuda.enable_flash_sdp", True),
    _functions("torch", "backends.cuda.mem_efficient_sdp_enabled", "backends.cuda.enable_mem_efficient_sdp", True),
    _functions("torch", "backends.cuda.math_sdp_enabled", "backends.cuda.enable_math_sdp", True),
    _functions("torch", "backends.cuda.cudnn_sdp_enabled", "backends.cuda.enable_cudnn_sdp", True),
    _attribute("torch", "backends.mkldnn.enabled", True),
    Setting(
        "torch.autograd.set_detect_anomaly",
        "torch",
        _anomaly,
        lambda torch, value: torch.autograd.set_detect_anomaly(*value),
        (False, True),
    ),
    _functions("torch", "is_warn_always_enabled", "set_warn_always", False),
    Setting(
        "torch.set_printoptions",
        "torch",
        lambda torch: _changed(_private_torch().print_options(), _TORCH_PRINTING),
        lambda torch, value: torch.set_printoptions(**value),
        {},
    ),
    _functions("torch.multiprocessing", "get_sharing_strategy", "set_sharing_strategy", "file_descriptor"),
    Setting(
        "torch.distributions.Distribution.set_default_validate_args",
        "torch.distributions",
        lambda _: _private_torch().validates_distributions(),
        lambda distributions, value: distributions.Distribution.set_default_validate_args(value),
        __debug__,
    ),
)
_BY_NAME = {setting.name: setting for setting in SETTINGS}


def capture() -> bytes:
    """Return the settings of this process and of the calling thread, pickled for `restore`."""
    packed: dict[str, bytes] = {}
    for name, value in _captured(SETTINGS).items():
        try:
            packed[name] = codec.dumps(value)
        except Exception as error:
            _log.warning("%s is not applied in the nodes, because its value %r does not pickle: %s", name, value, error)
    return codec.dumps(packed)


def restore(data: bytes) -> None:
    """Apply what `capture` has read, in a node's process."""
    values: dict[str, Any] = {}
    for name, value in codec.loads(data).items():
        try:
            values[name] = codec.loads(value)
        except Exception as error:
            _log.warning(
                "%s is not as the script has set it, because its value cannot be unpickled here: %s", name, error
            )
    _apply(values)


def thread_state() -> ThreadState:
    """Return a function that applies the settings of the calling thread in other threads of this process."""
    values = _captured(tuple(setting for setting in SETTINGS if setting.is_of_thread))
    return lambda: _apply(values)


def _captured(settings: tuple[Setting, ...]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for setting in settings:
        if module := sys.modules.get(setting.module):
            with contextlib.suppress(Exception):  # this version of the module does not have the setting
                value = setting.capture(module)
                if setting.default is _NoDefault or value != setting.default:
                    found[setting.name] = value
    return found


def _apply(values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        setting = _BY_NAME[name]
        try:
            setting.apply(importlib.import_module(setting.module), value)
        except Exception as error:
            _log.warning("%s is not as the script has set it, because setting %r failed here: %s", name, value, error)
