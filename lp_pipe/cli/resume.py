"""`lp_pipe launch --resume=RUN`: find the target and flags of an ended run, to launch it again."""

import argparse
import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lp_pipe.cli.errors import UsageError
from lp_pipe.cli.find_run import find_ended_run
from lp_pipe.launch.invocation import Invocation, current_folder
from lp_pipe.launch.run_records import RunRecord

# Arguments that concern only one launch, or only its display.
_NOT_KEPT = ("target", "run", "parser", "given", "resume", "run_dir", "json", "dry_run")


def invocation_of(arguments: argparse.Namespace, program_flags: Sequence[str]) -> Invocation:
    """Return the record of a launch: its command line, and the options that differ from their defaults."""
    given = {
        name: value
        for name, value in vars(arguments).items()
        if name not in _NOT_KEPT and value != arguments.parser.get_default(name)
    }
    return Invocation(("lp_pipe", *arguments.given), tuple(program_flags), arguments.target, given)


def resumed(
    arguments: argparse.Namespace, program_flags: Sequence[str]
) -> tuple[RunRecord, argparse.Namespace, Sequence[str]]:
    """Return the run that --resume names, and the arguments and program flags to launch.

    Without TARGET these are the run's own, in the folder where it was launched; options that are given now override
    them. With TARGET only the given ones count, and a note on stderr lists the differences.

    Raises:
        UsageError: there is no such run, it is live, or it cannot be launched without TARGET.
    """
    record = find_ended_run(arguments.resume)
    if arguments.target is None:
        arguments, program_flags = _as_before(arguments, program_flags, record)
    differences = list(_differences(record.flags, invocation_of(arguments, program_flags).flags))
    if record.flags.get("target") and differences:
        print(f"lp_pipe: run {record.name} had other flags: {'; '.join(differences)}", file=sys.stderr)
    return record, arguments, program_flags


def _as_before(
    arguments: argparse.Namespace, program_flags: Sequence[str], record: RunRecord
) -> tuple[argparse.Namespace, Sequence[str]]:
    target = record.flags.get("target")
    if not target:
        raise UsageError(f"run {record.name} was launched by a script: give TARGET, too, or run the script again")
    if record.folder.record.stat().st_uid != os.getuid():  # the target would run with this user's rights
        raise UsageError(f"run {record.name} was recorded by another user: give TARGET, too")
    if record.cwd != current_folder():
        if not Path(record.cwd).is_dir():
            raise UsageError(f"run {record.name} was launched in {record.cwd}, which is gone: give TARGET, too")
        print(f"lp_pipe: run {record.name} continues in {record.cwd}, where it was launched", file=sys.stderr)
        os.chdir(record.cwd)
    given = arguments.given[1 : arguments.given.index("--") if "--" in arguments.given else None]
    before = arguments.parser.parse_args([target])
    for name, value in record.flags["options"].items():
        setattr(before, name, value)
    now = arguments.parser.parse_args([target, *given], before)
    now.given = arguments.given
    return now, program_flags or record.flags["program"]


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Yield a text for each option that differs: its value now and before."""
    if not before.get("target"):
        return
    if before["target"] != now["target"]:
        yield f"TARGET {now['target']} (was {before['target']})"
    for name in sorted({*before["options"], *now["options"]}):
        old, new = before["options"].get(name), now["options"].get(name)
        if old != new:
            yield f"{_flag(name)} {_shown(new)} (was {_shown(old)})"
    if list(before["program"]) != list(now["program"]):
        yield f"-- {shlex.join(now['program']) or '(none)'} (was -- {shlex.join(before['program']) or '(none)'})"


def _flag(option: str) -> str:
    return f"--{option.removeprefix('option_').replace('_', '-')}"


def _shown(value: Any) -> str:
    return "the default" if value is None else str(value)
