"""The flags of the program itself, which follow `--` on the command line, and whether it wants any."""

import sys
from collections.abc import Iterator, Sequence
from typing import Any

from lp_pipe.cli.errors import UsageError


class Argv(list[str]):
    """A sys.argv that knows whether anybody has looked beyond its first entry."""

    was_read = False

    def __getitem__(self, index: Any) -> Any:
        self.was_read |= index != 0
        return super().__getitem__(index)

    def __iter__(self) -> Iterator[str]:
        self.was_read = True
        return super().__iter__()

    def __contains__(self, item: object) -> bool:
        self.was_read = True
        return super().__contains__(item)


def hand_over(file: str, flags: Sequence[str]) -> None:
    """sys.argv becomes [file, *flags]."""
    sys.argv = Argv([file, *flags])


def check_answered(target: str, flags: Sequence[str]) -> None:
    """When the program is made: absl and argparse have ended the command after --help, and so should others.

    Flags that nobody has looked at are said so. No error: code that runs in a node may read them yet.

    Raises:
        UsageError: the program would start in place of listing its flags.
    """
    if {"--help", "-h"} & set(flags):
        raise UsageError(f"{target} lists no flags: it takes none, or reads them without absl.flags or argparse")
    if flags and "absl.flags" not in sys.modules and not vars(sys.argv).get("was_read", False):
        print(f"lp_pipe: {target} has not looked at its flags: {' '.join(flags)}", file=sys.stderr)
