"""The way from a file or module to its Program, and from there to nodes in processes of their own."""

from pathlib import Path

import pytest

from tests.cli.commands import Command

PROGRAM = """
import {sibling}
import lp_pipe as lp

class Greeter:
    def run(self):
        print("hello from", {sibling}.PLACE)

program = lp.Program("demo")
program.add_node(lp.PyClassNode(Greeter), label="greeter")
"""


# random is a module of the standard library, rich one that the command has loaded: neither may be hidden.
@pytest.mark.parametrize("stem", ["demo", "random", "rich", "not-a-name"])
def test_nodes_get_the_files_code_whatever_its_name(stem: str, command: Command, folder: Path) -> None:
    place = folder / "programs"
    place.mkdir()
    (place / f"{stem}.py").write_text(PROGRAM.format(sibling="sibling"))
    (place / "sibling.py").write_text("PLACE = 'beside it'\n")
    done = command("launch", f"programs/{stem}.py", "--mode=process")
    assert (done.returncode, done.stderr) == (0, "")
    assert "[greeter/0] hello from beside it\n" in done.stdout


def test_a_module_in_a_package_of_the_current_folder(command: Command, folder: Path) -> None:
    package = folder / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "sibling.py").write_text("PLACE = 'the package'\n")
    (package / "demo.py").write_text(PROGRAM.format(sibling="package.sibling"))
    done = command("launch", "package.demo:program")
    assert (done.returncode, done.stderr) == (0, "")
    assert "[greeter/0] hello from the package\n" in done.stdout
    missing = command("launch", "package.dmo")
    assert (missing.returncode, missing.stderr) == (
        2,
        "lp_pipe: no module 'package.dmo'; a file is given as path/file.py\n",
    )


def test_a_missing_import_of_the_target_is_the_targets_failure(brief_command: Command, folder: Path) -> None:
    (folder / "demo.py").write_text("import no_such_module\n")
    done = brief_command("graph", "demo")
    assert done.returncode == 3
    assert done.stderr.splitlines() == [
        "lp_pipe: demo raised ModuleNotFoundError: No module named 'no_such_module'",
        "  demo.py:1 in <module>:  import no_such_module",
    ]


def test_a_missing_import_of_the_targets_package_is_its_failure_too(brief_command: Command, folder: Path) -> None:
    # "train", with which "training.main" begins, was taken for a part of the target: "no module 'training.main'".
    package = folder / "training"
    package.mkdir()
    (package / "__init__.py").write_text("import train\n")
    (package / "main.py").touch()
    done = brief_command("graph", "training.main")
    assert done.returncode == 3
    assert done.stderr.startswith("lp_pipe: training.main raised ModuleNotFoundError: No module named 'train'\n")


@pytest.mark.parametrize("name", ["prog", "prog-1", "notes.txt"])
def test_a_file_that_is_not_python_is_refused(name: str, brief_command: Command, folder: Path) -> None:
    (folder / name).write_text("program = None\n")
    done = brief_command("graph", f"./{name}")
    assert (done.returncode, done.stderr) == (
        2,
        f"lp_pipe: {name} is no Python file: its name must end in .py\n",
    )


@pytest.mark.parametrize("name", ["launch", "graph"])
def test_a_target_that_launches_its_program_itself_is_told_how(name: str, brief_command: Command, folder: Path) -> None:
    # The README's first program is such a script. Each of its nodes imported it, and launched it again: it never ended.
    script = PROGRAM.format(sibling="os").replace("os.PLACE", "'a script'")
    (folder / "script.py").write_text(f"{script}lp.launch(program, 'process').wait()\n")
    refused = brief_command(name, "script.py")
    first, place = refused.stderr.splitlines()
    assert refused.returncode == 3
    assert first.startswith("lp_pipe: script.py raised LaunchError: lp_pipe imports this file for its program")
    assert first.endswith('below `if __name__ == "__main__":`') and "in <module>:  lp.launch(program" in place
    (folder / "script.py").write_text(f"{script}if __name__ == '__main__':\n    lp.launch(program, 'process').wait()\n")
    assert brief_command(name, "script.py").returncode == 0


@pytest.mark.parametrize("place", ["folder", "notes.txt"])
def test_a_file_or_folder_is_not_looked_for_as_a_module(place: str, brief_command: Command, folder: Path) -> None:
    # "no module 'notes.txt'", and of a folder "has neither `program` nor `make_program`", as it is an empty package.
    (folder / "folder").mkdir()
    (folder / "notes.txt").touch()
    why = "is a folder; name" if place == "folder" else "is no Python file:"
    assert brief_command("graph", place).stderr.startswith(f"lp_pipe: {place} {why}")


@pytest.mark.parametrize("code", ["3", "0", "'no GPU here'"])
def test_a_target_that_exits_says_where(code: str, brief_command: Command, folder: Path) -> None:
    # Its status was the command's, without a word: 0, too, as if the program had been launched.
    (folder / "demo.py").write_text(f"def make_program():\n    raise SystemExit({code})\n")
    done = brief_command("launch", "demo.py")
    assert (done.returncode, done.stderr.splitlines()) == (
        3,
        [
            f"lp_pipe: demo.py raised SystemExit: {code.strip(chr(39))}",
            f"  demo.py:2 in make_program:  raise SystemExit({code})",
        ],
    )


@pytest.mark.parametrize("code", ["3", "0"])
def test_a_package_that_exits_says_where(code: str, brief_command: Command, folder: Path) -> None:
    # As above, but in the __init__ above the target, which is imported to find it.
    (folder / "training").mkdir()
    (folder / "training" / "__init__.py").write_text(f"import sys\nsys.exit({code})\n")
    (folder / "training" / "main.py").touch()
    done = brief_command("launch", "training.main:train")
    assert (done.returncode, done.stderr.splitlines()) == (
        3,
        [
            f"lp_pipe: training.main:train raised SystemExit: {code}",
            f"  training/__init__.py:2 in <module>:  sys.exit({code})",
        ],
    )


def test_a_package_sees_the_programs_flags(brief_command: Command, folder: Path) -> None:
    # It saw the command's own ones: argparse in an __init__ refused "launch training.main".
    (folder / "training").mkdir()
    (folder / "training" / "__init__.py").write_text("import sys\nprint(sys.argv[1:])\n")
    (folder / "training" / "main.py").write_text("import lp_pipe as lp\nprogram = lp.Program('a')\n")
    done = brief_command("graph", "training.main", "--", "--steps=3")
    assert done.stdout.splitlines()[0] == "['--steps=3']"


def test_a_target_that_answers_its_flags_ends_the_command_with_its_status(brief_command: Command, folder: Path) -> None:
    (folder / "demo.py").write_text("import argparse\nargparse.ArgumentParser().parse_args()\n")
    done = brief_command("launch", "demo.py", "--", "--nope")
    assert done.returncode == 2
    assert "unrecognized arguments: --nope" in done.stderr
    assert brief_command("launch", "demo.py", "--", "--help").returncode == 0


GUARDED = "if __name__ == '__main__':\n    train = 1\n"
MADE_BELOW_MAIN = (
    'code below `if __name__ == "__main__":` does not run here: make the program above it, or in a function'
)


@pytest.mark.parametrize(
    ("target", "text", "answer"),
    [
        ("demo.py", "train = lp.Program('a')", "has a program of another name; name one: demo.py:train"),
        (
            "demo.py",
            "train, serve = lp.Program('a'), lp.Program('b')",
            "has 2 programs; name one: demo.py:train or demo.py:serve",
        ),
        ("demo.py", GUARDED, f"has neither `program` nor `make_program`; {MADE_BELOW_MAIN}"),
        ("demo.py:train", GUARDED, f"has no 'train'; {MADE_BELOW_MAIN}"),
    ],
    ids=["one", "two", "below main", "below main by name"],
)
def test_a_program_that_is_not_found_is_looked_for(
    target: str, text: str, answer: str, brief_command: Command, folder: Path
) -> None:
    (folder / "demo.py").write_text(f"import lp_pipe as lp\n{text}\n")
    done = brief_command("launch", target)
    assert (done.returncode, done.stderr) == (2, f"lp_pipe: demo.py {answer}\n")


def test_a_function_that_launches_is_told_to_return_its_program(brief_command: Command, folder: Path) -> None:
    """Regression: it ran for hours, and then the command reported that it had returned None."""
    script = PROGRAM.format(sibling="os").replace("os.PLACE", "'a script'")
    (folder / "script.py").write_text(f"{script}def main():\n    lp.launch(program, 'process').wait()\n")
    done = brief_command("launch", "script.py:main")
    assert done.returncode == 3
    assert "lp_pipe calls script.py:main for its program and launches it itself: give a function" in done.stderr


def test_a_file_with_relative_imports_is_told_its_modules_name(brief_command: Command, folder: Path) -> None:
    (folder / "train").mkdir()
    (folder / "train/demo.py").write_text("from . import data\n")
    done = brief_command("launch", "train/demo.py")
    assert done.returncode == 3
    assert done.stderr.splitlines()[0].endswith("no known parent package; give it as a module: train.demo")
