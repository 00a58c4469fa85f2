"""A whole model as one .safetensors file, which torch, transformers and others read without lp_pipe."""

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lp_pipe.checkpoint.folder import sync
from lp_pipe.errors import PipelineError


def write(path: Path, state: Mapping[str, Any], step: int) -> None:
    """Write a state_dict to another file, down to the disk, then rename it. A tied parameter is there under each name.

    Raises:
        PipelineError: safetensors is not installed, the folder is missing, a value is no tensor, or the file cannot be
            written (the disk is full, the folder is read-only, …): an older one stays as it was.
    """
    try:
        from safetensors import SafetensorError
        from safetensors.torch import save_file
    except ImportError as error:
        raise PipelineError("export() needs safetensors: pip install 'lp_pipe[torch]'") from error
    if not path.parent.is_dir():
        raise PipelineError(f"export({str(path)!r}): there is no folder {path.parent}")
    tensors: dict[str, Tensor] = {}
    memory: set[int] = set()
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise PipelineError(f"export: {name} is a {type(value).__name__}, but safetensors holds tensors only")
        if value.layout is not torch.strided:
            raise PipelineError(
                f"export: {name} is of layout {value.layout}, but safetensors holds dense tensors only: keep it "
                "dense, or register the buffer with persistent=False"
            )
        tensor = value.detach().contiguous()
        address = tensor.untyped_storage().data_ptr()
        tensors[name] = tensor.clone() if address in memory else tensor  # the format allows one name for a memory
        memory.add(address)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        aside.touch()
        mode = aside.stat().st_mode  # the umask's; safetensors makes files that only their owner reads
        save_file(tensors, aside, metadata={"format": "pt", "step": str(step)})
        aside.chmod(mode)
        sync(aside)
        aside.replace(path)
    except (OSError, SafetensorError) as error:
        why = str(error).removeprefix("Error while serializing: ")
        raise PipelineError(f"export({str(path)!r}): the file cannot be written: {why}") from error
    finally:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
