"""absl's flags have the values in nodes that they had at launch(), however the script was started.

A node's process does not run the script, so it neither defines the flags nor parses them.
"""

import contextlib
import copyreg
import sys
from typing import TYPE_CHECKING, Any

from lp_pipe.rpc import codec

if TYPE_CHECKING:
    from absl.flags import FlagValues

# What these modules define acts when it is set (verbosity), and is theirs to define.
_OWN_MODULES = ("absl.app", "absl.logging")


def name_in_pickles() -> None:
    """Let `FLAGS`, when functions of a script refer to it, mean the node's own flags; absl refuses to pickle it."""
    absl_flags = sys.modules.get("absl.flags")
    if absl_flags is not None:
        copyreg.pickle(absl_flags.FlagValues, _by_name)


def here() -> bytes:
    """The values of all flags, if they were parsed, for `arrive`."""
    absl_flags = sys.modules.get("absl.flags")
    if absl_flags is None or not absl_flags.FLAGS.is_parsed():
        return b""
    values: dict[str, bytes] = {}
    for name, value in absl_flags.FLAGS.flag_values_dict().items():
        with contextlib.suppress(Exception):  # a flag of one's own kind: nodes that use it will say that it is missing
            values[name] = codec.dumps(value)
    return codec.dumps(([name for name in _OWN_MODULES if name in sys.modules], values))


def arrive(packed: bytes) -> None:
    """In a node's process, before its code is loaded: define and set what `here` has told."""
    if not packed:
        return
    import importlib

    from absl import flags

    modules, values = codec.loads(packed)
    for module in modules:
        importlib.import_module(module)
    for name, value in values.items():
        if name not in flags.FLAGS:
            # allow_override, and a value that is no default: a module that defines the flag later leaves it as it is.
            flag: flags.Flag[Any] = flags.Flag(
                flags.ArgumentParser(), None, name, None, "as at launch()", allow_override=True
            )
            flags.DEFINE_flag(flag)
        with contextlib.suppress(Exception):  # a value whose class is not there
            flags.FLAGS[name].value = codec.loads(value)
            flags.FLAGS[name].using_default_value = False
    flags.FLAGS.mark_as_parsed()


def _by_name(values: "FlagValues") -> tuple[Any, ...]:
    if values is not sys.modules["absl.flags"].FLAGS:
        raise TypeError("can't pickle FlagValues other than absl.flags.FLAGS")
    return _of_this_process, ()


def _of_this_process() -> Any:
    from absl import flags

    return flags.FLAGS
