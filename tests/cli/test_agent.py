"""The files from which an agent takes the run's secret, and its errors about the others."""

import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from lp_pipe.cli.agent import is_private, read_token_file
from lp_pipe.cli.errors import UsageError

ME, ROOT, OTHER = 65532, 0, 1000
SHARED = 100  # a group of several users


@pytest.mark.parametrize(
    ("mode", "owner", "group", "is_taken"),
    [
        (0o600, ME, ME, True),
        (0o400, ME, SHARED, True),
        (0o440, ROOT, ME, True),  # of a Secret, in a pod with fsGroup
        (0o040, ROOT, ME, True),
        (0o444, ROOT, ME, False),  # everybody may read it
        (0o441, ROOT, ME, False),
        (0o460, ROOT, ME, False),  # who may write it may be somebody else tomorrow
        (0o450, ROOT, ME, False),
        (0o440, ROOT, SHARED, False),
        (0o440, ROOT, ROOT, False),
        (0o440, ME, ME, False),  # who owns it can say chmod 600
        (0o440, OTHER, ME, False),
        (0o644, ME, ME, False),
        (0o604, ROOT, ME, False),
    ],
)
def test_only_its_user_may_read_it_or_it_is_a_secrets_file_in_a_pod(
    mode: int, owner: int, group: int, is_taken: bool
) -> None:
    assert is_private(status(mode, owner, group), ME, ME) == is_taken


def test_a_group_that_several_users_may_have_is_none_of_ones_own() -> None:
    assert not is_private(status(0o440, ROOT, SHARED), ME, SHARED)
    assert not is_private(status(0o440, ROOT, ROOT), ROOT, ROOT)  # root reads it without its group


def status(mode: int, owner: int, group: int) -> os.stat_result:
    return os.stat_result((stat.S_IFREG | mode, 0, 0, 0, owner, group, 0, 0, 0, 0))


def test_the_error_says_what_was_found_and_what_would_do(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"{}")
    secret.chmod(0o640)
    with pytest.raises(UsageError) as raised:
        read_token_file(str(secret))
    said = str(raised.value)
    assert f"--token-file={secret}: " in said and f"`chmod 600 {secret}` (it has mode 640" in said
    assert f"of user {os.getuid()}, group {secret.stat().st_gid}" in said and "root owns it" in said


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nothing: No such file"):
        read_token_file(str(tmp_path / "nothing"))


AS_ANOTHER_USER = f"""
import os, sys
from lp_pipe.cli.errors import UsageError
from lp_pipe.cli.agent import read_token_file
os.setgroups([{SHARED}]), os.setgid({ME}), os.setuid({ME})  # only now: the interpreter may be closed to others
for path in sys.argv[1:]:
    try:
        print(read_token_file(path).decode())
    except UsageError as error:
        print("others" if "chmod 600" in str(error) else error)
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """Return a folder that other users may enter."""
    with tempfile.TemporaryDirectory(prefix="lp-secret-", dir="/tmp") as made:
        os.chmod(made, 0o755)
        yield Path(made)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_user_without_rights_reads_roots_file_only_by_a_group_of_its_own(folder: Path) -> None:
    paths = []
    for mode, group in [(0o440, ME), (0o440, SHARED), (0o444, ME), (0o400, ME)]:
        paths.append(folder / f"{mode:o}-{group}")
        paths[-1].write_bytes(b"secret")
        paths[-1].chmod(mode)
        os.chown(paths[-1], ROOT, group)
    done = subprocess.run(
        [sys.executable, "-c", AS_ANOTHER_USER, *map(str, paths)], capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines() == [
        "secret",
        "others",
        "others",
        f"--token-file={paths[-1]}: Permission denied",
    ], done.stderr
