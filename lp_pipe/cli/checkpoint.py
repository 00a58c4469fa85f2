"""`lp_pipe checkpoint`: list and verify what a run has saved, and export its model as one file."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from lp_pipe.checkpoint import Checkpoint, checkpoints_in, open_checkpoint
from lp_pipe.checkpoint.folder import part_names
from lp_pipe.cli.errors import UNHEALTHY, UsageError, counted
from lp_pipe.cli.output_files import output_path
from lp_pipe.cli.table import table
from lp_pipe.errors import CheckpointError, PipelineError
from lp_pipe.pipeline.saving import METADATA
from lp_pipe.telemetry.run_folder import RunFolder

EPILOG = """\
examples:
  lp_pipe checkpoint ls runs/char_gpt-20260101-120000-4711-123456
  lp_pipe checkpoint verify runs/…/checkpoints/step-00000100
  lp_pipe checkpoint export runs/…/checkpoints/step-00000100 -o model.safetensors

PATH is a checkpoint, a folder of checkpoints, a run's folder, or a folder that pipeline.save has written. Of several
checkpoints, export takes the newest. verify ends with status 1 if a checkpoint is damaged.
"""


HELP = "list, verify and export a run's checkpoints"
DESCRIPTION = "List, verify and export what a program has saved with lp_pipe.checkpoint, or with pipeline.save."
USAGE = "lp_pipe checkpoint ls|verify|export PATH [options]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("what", metavar="ls|verify|export", choices=["ls", "verify", "export"])
    parser.add_argument("path", metavar="PATH", type=Path, nargs="?", default=Path(), help="default: this folder")
    parser.add_argument("-o", dest="output", metavar="FILE.safetensors", help="export: the file to write")
    parser.add_argument("--part", help="export: which pipeline, if a checkpoint has several")
    parser.add_argument("--json", action="store_true", help="ls, verify: print one JSON object a line")


def run_command(arguments: argparse.Namespace, program_flags: Sequence[str]) -> int:
    """List, verify or export.

    Raises:
        UsageError: there is no checkpoint, or it has no model to export.
    """
    paths = _paths(arguments.path)
    if arguments.what == "ls":
        return _list(paths, as_json=arguments.json)
    if arguments.what == "verify":
        return _verify(paths, as_json=arguments.json)
    return _export(paths[-1], arguments.output, arguments.part)


def _paths(path: Path) -> list[Path]:
    for folder in (path, RunFolder(path).checkpoints):
        found = checkpoints_in(folder)
        if found:
            return found
    if not path.exists():
        raise UsageError(f"{path} does not exist")
    if path.name.startswith("step-") or is_saved_pipeline(path):
        return [path]
    found = [folder for folder in sorted(path.iterdir()) if is_saved_pipeline(folder)] if path.is_dir() else []
    if found:
        return found
    raise UsageError(f"{path} has no finished checkpoint: give the folder of a checkpoint, or of a run that saved one")


def _open(path: Path) -> Checkpoint:
    return open_saved_pipeline(path) if is_saved_pipeline(path) else open_checkpoint(path)


def _list(paths: Sequence[Path], *, as_json: bool) -> int:
    rows = []
    for path in paths:
        try:
            found = _open(path)
        except CheckpointError as error:
            if as_json:
                print(json.dumps({"path": str(path), "damage": [str(error)]}))
            rows.append((path.name, "", "", "", f"damaged: {error}", ""))
            continue
        if as_json:
            print(json.dumps(_as_json(found)))
        metrics = ", ".join(f"{name}={value:.6g}" for name, value in found.metrics.items())
        row = (path.name, str(found.step), f"{found.size:,}", str(len(found.files)), ", ".join(found.parts), metrics)
        rows.append(row)
    if not as_json:
        columns = ("CHECKPOINT", "STEP", "BYTES", "FILES", "PARTS", "METRICS")
        shown = len(columns) if any(row[-1] for row in rows) else -1
        print(table(columns[:shown], [row[:shown] for row in rows]))
    return 0


def _verify(paths: Sequence[Path], *, as_json: bool) -> int:
    damaged = 0
    for path in paths:
        try:
            found = _open(path)
            wrong = found.damage()
            good = f"{counted(len(found.files), 'file')}, {found.size:,} bytes: unchanged since they were written"
        except CheckpointError as error:
            wrong = [str(error)]
        damaged += bool(wrong)
        if as_json:
            print(json.dumps({"path": str(path), "damage": wrong}))
        else:
            print("\n".join(f"{path}: {line}" for line in wrong or [good]))
    return UNHEALTHY if damaged else 0


def _export(path: Path, output: str | None, part: str | None) -> int:
    if output is None:
        raise UsageError("export needs -o FILE.safetensors")
    target = output_path(output, [".safetensors"])
    from lp_pipe.pipeline.saving.dcp_reading import export, is_saved_model  # needs torch

    folders = [path] if is_saved_pipeline(path) else sorted(path.iterdir())
    parts = {name: part for part, name in part_names(_parts_in(path)).items()}
    pipelines = {parts.get(folder.name, folder.name): folder for folder in folders if is_saved_model(folder)}
    if not pipelines:
        raise UsageError(f"{path} has no pipeline, so it has no model to export")
    if part is None and len(pipelines) > 1:
        raise UsageError(f"{path} has the pipelines {', '.join(pipelines)}: choose one with --part")
    name = part or next(iter(pipelines))
    if name not in pipelines:
        raise UsageError(f"{path} has no pipeline {name!r}, only {', '.join(pipelines)}")
    try:
        count = export(pipelines[name], target)
    except (CheckpointError, PipelineError) as error:
        raise UsageError(str(error)) from error
    print(f"wrote {target}: {counted(count, 'tensor')}")
    return 0


def _parts_in(path: Path) -> Sequence[str]:
    """Return the parts of a checkpoint; none for another folder, such as one of saved pipelines."""
    try:
        return open_checkpoint(path).parts
    except CheckpointError:
        return ()


def _as_json(found: Checkpoint) -> dict[str, object]:
    return {
        "path": str(found.path),
        "step": found.step,
        "saved": found.saved,
        "bytes": found.size,
        "files": len(found.files),
        "parts": found.parts,
        "metrics": found.metrics,
    }


class SavedPipeline(Checkpoint):
    """A folder that `pipeline.save` has written. It has a checksum for each entry, and none for a file as a whole."""

    def damage(self) -> list[str]:
        from lp_pipe.pipeline.saving.dcp_reading import SavedFolder  # needs torch

        return SavedFolder(self.path).damage()


def is_saved_pipeline(path: Path) -> bool:
    return (path / METADATA).is_file()


def open_saved_pipeline(path: Path) -> SavedPipeline:
    """Read a saved pipeline's manifest.

    Raises:
        CheckpointError: the folder is damaged, or lp_pipe did not write it.
    """
    from lp_pipe.pipeline.saving.dcp_reading import SavedFolder  # needs torch

    step = SavedFolder(path).manifest().step
    files = {file.name: (file.stat().st_size, "") for file in sorted(path.iterdir()) if file.is_file()}
    return SavedPipeline(path, step, (path / METADATA).stat().st_mtime, ("pipeline",), files)
