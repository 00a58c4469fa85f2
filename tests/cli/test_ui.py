"""`lp_pipe ui` refuses what it cannot serve, serves what it can, and ends with its standard input if told to."""

import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from lp_pipe.cli.main import main
from tests.dashboard.fixtures import write_run


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["nothing-here"], "nothing-here"),
        (["--host", "0.0.0.0"], "0.0.0.0"),
        (["--cert", "cert.pem"], "--key"),
        (["--metrics-port", "0"], "--metrics-port"),
        (["--port", "eighty"], "eighty"),
    ],
)
def test_what_cannot_be_served_is_wrong_usage(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    assert main(["ui", *arguments]) == 2
    assert named in capsys.readouterr().err


def test_first_line_is_the_url_with_a_token(folder: Path) -> None:
    write_run(folder / "one", {"trainer": 1})
    command = [sys.executable, "-m", "lp_pipe", "ui", "one", "--until-stdin-ends"]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    url = server.stdout.readline().strip()
    with urllib.request.urlopen(url, timeout=20) as answer:
        assert answer.status == 200
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(url.partition("?")[0], timeout=20)
    assert refused.value.code == 401
    server.communicate(timeout=20)  # closes its standard input
    assert server.returncode == 0
