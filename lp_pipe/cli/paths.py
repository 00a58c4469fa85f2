"""Paths as people want to read them."""

import os
from pathlib import Path


def shown(path: str | Path) -> Path:
    """Relative where it lies below the current folder."""
    here, path = Path(os.path.realpath(Path.cwd())), Path(path)
    return path.relative_to(here) if path.is_relative_to(here) else path
