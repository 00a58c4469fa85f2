"""The template process, on its own."""

import socket
import subprocess
import sys
from pathlib import Path


def test_a_template_whose_launcher_died_before_it_was_up_removes_the_runs_folder(tmp_path: Path) -> None:
    # An agent that was killed just after its start left its folder of sockets.
    launcher = subprocess.Popen([sys.executable, "-c", ""])
    launcher.wait()
    folder = tmp_path / "sockets"
    folder.mkdir()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        boot = "import sys; from lp_pipe.launch.processes.zygote import main; fd, pid = map(int, sys.argv[1:3])"
        boot += "; main(fd, pid, [], 1.0, sys.argv[3])"
        command = [sys.executable, "-c", boot, str(theirs.fileno()), str(launcher.pid), str(folder)]
        done = subprocess.run(command, pass_fds=[theirs.fileno()], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "ended before its template process was up" in done.stderr
    assert not folder.exists()
