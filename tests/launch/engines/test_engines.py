"""The list of engines, the names of hosts, and the engine that leaves the starting to a person."""

import importlib.metadata
import os
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import lp_pipe as lp
from lp_pipe.launch import engines
from lp_pipe.launch.engines import Engine, HostOffer, Invitation, ManualEngine, SshEngine, StartedAgent
from lp_pipe.launch.engines.host_list import read_hosts


def test_hosts_are_written_in_a_row_or_in_a_file_with_what_may_be_used_of_them(tmp_path: Path) -> None:
    labelled = HostOffer("me@h2", cpus=8, gpus=4, labels=frozenset({"fast", "ib"}))
    expected = [HostOffer("h1"), labelled, HostOffer("fe80::1", memory=2 << 30)]
    text = "h1, me@h2:gpus=4:label=fast:cpus=8:label=ib,[fe80::1]:memory_gib=2"
    assert read_hosts(text) == expected
    file = tmp_path / "hosts"
    file.write_text("# ours\n" + text.replace(",", "\n") + "  # the last one\n")
    assert read_hosts(str(file)) == expected


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("h1,h1", "'h1,h1'.* h1 "),
        ("", "hosts=''"),
        ("h1:gpu=4", "'h1:gpu=4': 'gpu=4'"),
        ("h1:gpus=many", "'gpus=many'"),
        ("h1:label=", "'h1:label='"),
        ("-oProxyCommand=x", "'-oProxyCommand=x'"),
        ("/no/such/file", "hosts='/no/such/file'.*No such file"),
    ],
)
def test_hosts_that_make_no_sense_are_refused_in_words(text: str, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        read_hosts(text)


def test_an_engine_is_made_from_its_name_and_its_own_options_only() -> None:
    assert len(engines.make_engine("local", "3", {}).hosts()) == 3
    assert isinstance(engines.make_engine("ssh", "h1", {"python": "/usr/bin/python3"}), SshEngine)
    with pytest.raises(ValueError, match=r"engine 'local' has no option 'python'.*none"):
        engines.make_engine("local", "3", {"python": "python3"})
    with pytest.raises(ValueError, match="engine 'ssh': hosts"):
        engines.make_engine("ssh", "", {})
    with pytest.raises(ValueError, match="ssh_config="):
        engines.make_engine("ssh", "h1", {"ssh_config": "/no/such/file"})


class Elsewhere(Engine):
    """An engine as another package would bring it."""

    def __init__(self, hosts: str = "", **options: str) -> None:
        self.asked = hosts

    def hosts(self) -> Sequence[HostOffer]:
        return [HostOffer(self.asked)]

    def start(self, invitation: Invitation) -> Sequence[StartedAgent]:
        return []


def test_a_package_adds_an_engine_by_an_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [
        importlib.metadata.EntryPoint("elsewhere", f"{__name__}:Elsewhere", engines.ENTRY_POINTS),
        importlib.metadata.EntryPoint("wrong", "json:loads", engines.ENTRY_POINTS),
    ]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: points)
    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])
    assert engines.engine_names() == [*engines.BUILT_IN, "elsewhere", "wrong"]
    assert engines.make_engine("elsewhere", "far", {}).hosts() == [HostOffer("far")]
    with pytest.raises(ValueError, match="not a subclass of Engine"):
        engines.engine_class("wrong")
    with pytest.raises(ValueError, match=r"unknown engine 'other'.* local, ssh, .*, elsewhere, wrong"):
        engines.engine_class("other")


def test_the_secret_is_not_shown_with_the_invitation() -> None:
    invitation = Invitation(["10.0.0.1:1"], b"very secret", "/tmp")
    assert "very secret" not in repr(invitation) and "very secret" not in " ".join(invitation.arguments("h1"))


class _ByHand(ManualEngine):
    """A person who does at once what the engine has said, on this host."""

    def start(self, invitation: Invitation) -> Sequence[StartedAgent]:
        super().start(invitation)
        assert self._file is not None and stat.S_IMODE(self._file.stat().st_mode) == 0o600
        arguments = invitation.arguments("by-hand", str(self._file))
        self.agent = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, text=True)
        return []


def test_agents_may_be_started_by_hand(no_leaks: None, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    class Echo:
        def pid(self) -> int:
            return os.getpid()

    program = lp.Program("by hand")
    handle = program.add_node(lp.CourierNode(Echo), label="echo")
    engine = _ByHand("by-hand")
    with lp.launch(program, "multi_host", engine=engine, listen="127.0.0.1", run_dir=tmp_path) as run:
        assert run.client(handle).pid() != os.getpid()
    output, _ = engine.agent.communicate(timeout=20)
    assert engine.agent.returncode == 0 and "the run has ended" in output
    assert not (tmp_path / "agents.secret").exists()
    assert "agent --join 127.0.0.1:" in capfd.readouterr().err


def test_a_secret_that_others_may_read_is_refused(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"{}")
    secret.chmod(0o644)
    command = [sys.executable, "-m", "lp_pipe", "agent", "--join", "127.0.0.1:9", "--token-file", str(secret)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and f"chmod 600 {secret}" in done.stderr
