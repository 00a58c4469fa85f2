"""Pods on this host, really run by podman, from what a cluster's kubelet would be given.

What differs: the image is empty, and the host's Python is mounted into it; the host's network; the secret is mounted as
a file of the host (podman 4.3 crashes on volumes of Secrets); /dev/shm is no memory; nothing runs the probes (podman
wants systemd for that).
"""

import copy
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from tests.launch.engines.kubelet import volumes_of

_PROGRAMS = ("podman", "runc", "catatonit")
_REPOSITORY = Path(__file__).parents[3]
_CONFIG = """\
[containers]
log_driver = "k8s-file"
default_ulimits = ["nofile=4096:4096", "nproc=4096:4096"]
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
"""
IMAGE = "localhost/agent:1"


def why_not() -> str:
    """Return why no pods can be run here, or an empty string."""
    if os.geteuid() != 0:
        return "podman as it is used here needs root"
    missing = [name for name in _PROGRAMS if shutil.which(name) is None]
    return f"not installed: {', '.join(missing)}" if missing else ""


class Podman:
    """Pods with a storage of their own, from construction until `close`."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="lp-podman-"))
        (self._folder / "containers.conf").write_text(_CONFIG)
        self._environment = {**os.environ, "CONTAINERS_CONF": str(self._folder / "containers.conf")}
        self._podman = ["podman", "--storage-driver=vfs", "--root", f"{self._folder}/root"]
        self._podman += ["--runroot", f"{self._folder}/run"]
        self._write_image(self._folder / "image.tar")
        self._run("import", "--change", "ENV PATH=/opt/python:/usr/bin", str(self._folder / "image.tar"), IMAGE)

    def start(self, pod: dict[str, Any], secret: bytes, index: int) -> "subprocess.Popen[str]":
        """Prints the log of its container, and ends with its exit status."""
        name = pod["metadata"]["name"]
        (self._folder / name).mkdir()
        (self._folder / name / "pod.json").write_text(json.dumps(self._runnable(pod, secret, index)))
        podman = " ".join(self._podman)
        script = (
            f"{podman} kube play {self._folder}/{name}/pod.json >{self._folder}/{name}/play 2>&1 "
            f"|| {{ cat {self._folder}/{name}/play; exit 125; }}\n"
            f"{podman} logs --follow {name}-agent\nexit $({podman} wait {name}-agent)"
        )
        return subprocess.Popen(
            ["sh", "-c", script], env=self._environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def execute(self, pod: dict[str, Any], command: list[str]) -> str:
        """Run a command in the pod's container, and raise if it fails."""
        return self._run("exec", f"{pod['metadata']['name']}-agent", *command)

    def close(self) -> None:
        try:
            self._run("pod", "rm", "--all", "--force", "--time=0")
        finally:
            shutil.rmtree(self._folder)

    def _runnable(self, pod: dict[str, Any], secret: bytes, index: int) -> dict[str, Any]:
        found = copy.deepcopy({key: pod[key] for key in ("apiVersion", "kind", "spec")})
        found["metadata"] = {key: pod["metadata"][key] for key in ("name", "labels")}
        spec = found["spec"]
        spec["hostNetwork"] = True
        (container,) = spec["containers"]
        # Kubernetes does that by itself; this podman does not.
        container["args"] = [part.replace("$(JOB_COMPLETION_INDEX)", str(index)) for part in container["args"]]
        made = volumes_of(pod, secret, self._folder / pod["metadata"]["name"])
        spec["volumes"] = [_host_path(name, str(folder)) for name, folder in made.items()]
        for number, path in enumerate(sorted({"/usr", sys.prefix, sys.base_prefix, str(_REPOSITORY)})):
            spec["volumes"].append(_host_path(f"host{number}", path))
            container["volumeMounts"].append({"name": f"host{number}", "mountPath": path, "readOnly": True})
        return found

    def _write_image(self, path: Path) -> None:
        python = f'#!/bin/sh\nPYTHONPATH={_REPOSITORY} exec {sys.executable} "$@"\n'.encode()
        with tarfile.open(path, "w") as tar:
            for name in ("usr", "etc", "tmp", "proc", "sys", "dev", "run", "opt", "opt/python"):
                folder = tarfile.TarInfo(name)
                folder.type, folder.mode = tarfile.DIRTYPE, 0o1777 if name == "tmp" else 0o755
                tar.addfile(folder)
            for name in ("bin", "lib", "lib64"):
                link = tarfile.TarInfo(name)
                link.type, link.linkname = tarfile.SYMTYPE, f"usr/{name}"
                tar.addfile(link)
            for name, data, mode in (
                ("opt/python/python", python, 0o755),
                ("etc/passwd", b"root:x:0:0::/:/bin/sh\n", 0o644),
            ):
                file = tarfile.TarInfo(name)
                file.size, file.mode = len(data), mode
                tar.addfile(file, io.BytesIO(data))

    def _run(self, *arguments: str) -> str:
        command = [*self._podman, *arguments]
        done = subprocess.run(command, env=self._environment, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, f"{' '.join(arguments)}: {done.stderr}"
        return done.stdout


def _host_path(name: str, path: str) -> dict[str, Any]:
    return {"name": name, "hostPath": {"path": path, "type": "Directory"}}
