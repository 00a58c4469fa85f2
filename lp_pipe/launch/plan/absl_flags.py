"""Give absl's flags the same values in nodes that they had at `launch()`.

A node's process does not run the script, so without this it would neither define the flags nor parse them.
"""

import contextlib
import copyreg
import sys
from typing import TYPE_CHECKING, Any

from lp_pipe.rpc import codec

if TYPE_CHECKING:
    from absl.flags import FlagValues

# The flags of these modules take effect when they are set (verbosity), and the modules must define them themselves.
_OWN_MODULES = ("absl.app", "absl.logging")


def name_in_pickles() -> None:
    """Pickle `FLAGS` by name, so that a sent function uses the node's own flags. absl itself refuses to pickle it."""
    absl_flags = sys.modules.get("absl.flags")
    if absl_flags is not None:
        copyreg.pickle(absl_flags.FlagValues, _by_name)


def capture() -> bytes:
    """Return the values of all flags, if they were parsed, for `restore`."""
    absl_flags = sys.modules.get("absl.flags")
    if absl_flags is None or not absl_flags.FLAGS.is_parsed():
        return b""
    values: dict[str, bytes] = {}
    for name, value in absl_flags.FLAGS.flag_values_dict().items():
        with contextlib.suppress(Exception):  # a value that does not pickle: a node that uses this flag gets an error
            values[name] = codec.dumps(value)
    return codec.dumps(([name for name in _OWN_MODULES if name in sys.modules], values))


def restore(packed: bytes) -> None:
    """Define and set the flags that `capture` has read. Called in a node's process, before its code is loaded."""
    if not packed:
        return
    import importlib

    from absl import flags

    modules, values = codec.loads(packed)
    for module in modules:
        importlib.import_module(module)
    for name, value in values.items():
        if name not in flags.FLAGS:
            # allow_override and a non-default value: a module that defines the flag later keeps this value.
            flag: flags.Flag[Any] = flags.Flag(
                flags.ArgumentParser(), None, name, None, "as at launch()", allow_override=True
            )
            flags.DEFINE_flag(flag)
        with contextlib.suppress(Exception):  # the value's class cannot be imported here
            flags.FLAGS[name].value = codec.loads(value)
            flags.FLAGS[name].using_default_value = False
    flags.FLAGS.mark_as_parsed()


def _by_name(values: "FlagValues") -> tuple[Any, ...]:
    if values is not sys.modules["absl.flags"].FLAGS:
        raise TypeError("cannot pickle FlagValues other than absl.flags.FLAGS")
    return _of_this_process, ()


def _of_this_process() -> Any:
    from absl import flags

    return flags.FLAGS
