"""A kubelet's work on the folders of a pod before it starts: their content, owner, group and mode.

Sources: kubernetes, pkg/volume/secret/secret.go (files have `defaultMode`, are root's, and the volume is read-only),
pkg/volume/emptydir/empty_dir.go (mode 0777) and pkg/volume/volume_linux.go (with `fsGroup`: everything gets that group,
and is readable for it, folders too and with setgid; what is not read-only is also writable for it).
"""

import os
import stat
from pathlib import Path
from typing import Any


def volumes_of(pod: dict[str, Any], secret: bytes, folder: Path) -> dict[str, Path]:
    """The folders of its volumes, by name, made below `folder`; as root with their owners, else with ours."""
    group = pod["spec"]["securityContext"].get("fsGroup")
    made = {}
    for volume in pod["spec"]["volumes"]:
        path = made[volume["name"]] = folder / volume["name"]
        path.mkdir()
        path.chmod(0o777)
        if "secret" in volume:
            (path / "secret").write_bytes(secret)
            (path / "secret").chmod(volume["secret"]["defaultMode"])
        if group is not None:
            for one in (*path.iterdir(), path):
                _give_to(group, one, is_read_only="secret" in volume)
    return made


def _give_to(group: int, path: Path, is_read_only: bool) -> None:
    if os.geteuid() == 0:
        os.chown(path, -1, group)
    mode = stat.S_IMODE(path.stat().st_mode) | (0o440 if is_read_only else 0o660)
    path.chmod(mode | 0o2110 if path.is_dir() else mode)
