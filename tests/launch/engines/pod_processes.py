"""Containers of pods as processes of this host, with the user, groups, privileges, environment and volumes of the pod.

What differs from a container: the file system and the network are the host's; volumes are where there is room for them,
and the paths where the pod has them are replaced by those; nothing runs the probes.
"""

import os
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.launch.engines.kubelet import volumes_of

_REPOSITORY = Path(__file__).parents[3]
_BECOME = {"reuid": "runAsUser", "regid": "runAsGroup", "groups": "fsGroup"}


def why_not() -> str:
    """Return why no such processes can be started here, or an empty string."""
    if os.geteuid() != 0:
        return "only root can become another user"
    if shutil.which("setpriv") is None or shutil.which("unshare") is None:
        return "not installed: setpriv, unshare (util-linux)"
    done = subprocess.run(["unshare", "--mount", "true"], capture_output=True, text=True, check=False)
    return f"no mounts of our own: {done.stderr.strip()}" if done.returncode else ""


class PodProcesses:
    """The processes of pods, until `close`. folder: has all their files; other users may enter it, root may write."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="lp-pods-", dir="/tmp"))  # the usual folder is ours alone
        self.folder.chmod(0o755)

    def start(self, pod: dict[str, Any], secret: bytes, index: int) -> "subprocess.Popen[str]":
        """Prints the log of its container, and ends with its exit status."""
        folder = self.folder / pod["metadata"]["name"]
        folder.mkdir()
        (container,) = pod["spec"]["containers"]
        volumes = volumes_of(pod, secret, folder)
        (folder / "tmp").mkdir()
        (folder / "tmp").chmod(0o1777)
        replaced = {mount["mountPath"]: str(volumes[mount["name"]]) for mount in container["volumeMounts"]}
        replaced["$(JOB_COMPLETION_INDEX)"] = str(index)
        arguments = [_replace(part, replaced) for part in container["args"]]
        told = {one["name"]: _replace(one["value"], replaced) for one in container["env"]}
        return subprocess.Popen(
            _command(pod["spec"]["securityContext"], arguments, folder / "kept"),
            env={"PATH": os.environ["PATH"], "PYTHONPATH": str(_REPOSITORY), "TMPDIR": f"{folder}/tmp", **told},
            cwd="/",
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def close(self) -> None:
        shutil.rmtree(self.folder)


def _command(security: Mapping[str, Any], arguments: list[str], kept: Path) -> list[str]:
    become = [
        f"--reuid={security['runAsUser']}",
        f"--regid={security['runAsGroup']}",
        f"--groups={security['fsGroup']}",
    ]
    become += ["--no-new-privs", "--inh-caps=-all", "--bounding-set=-all"]
    words = ["setpriv", *become, sys.executable, *arguments]
    return ["unshare", "--mount", "sh", "-ec", f"{_opened(kept)}\nexec {shlex.join(words)}"]


def _opened(kept: Path) -> str:
    """Commands that let everybody to this interpreter and lp_pipe, also where a folder above them is of root alone.

    In mounts of our own: such a folder is covered by an empty one, into which what we need is mounted again.
    """
    needed = sorted({Path(sys.prefix), Path(sys.base_prefix), _REPOSITORY})
    closed = {path: _topmost_closed(path) for path in needed if _topmost_closed(path)}
    keep = [f"mkdir -p {kept}/{i} && mount --bind {path} {kept}/{i}" for i, path in enumerate(closed)]
    cover = [f"mount -t tmpfs -o mode=755 none {top}" for top in sorted(set(closed.values()))]
    show = [f"mkdir -p {path} && mount --bind {kept}/{i} {path}" for i, path in enumerate(closed)]
    return "\n".join([*keep, *cover, *show])


def _topmost_closed(path: Path) -> str:
    closed = [folder for folder in path.parents if not folder.stat().st_mode & stat.S_IXOTH]
    return str(closed[-1]) if closed else ""


def _replace(text: str, replaced: Mapping[str, str]) -> str:
    for old, new in replaced.items():
        text = text.replace(old, new)
    return text
