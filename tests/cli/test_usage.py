"""Wrong usage: one line on stderr that says what to do, and exit status 2."""

import subprocess
import sys
from pathlib import Path

import numpy
import pytest

import lp_pipe
from lp_pipe.cli.main import COMMANDS
from tests.cli.commands import PATIENCE_S, Command

TARGET = """
import lp_pipe as lp
from absl import flags

flags.DEFINE_integer("stages", 2, "How many stages.", lower_bound=1)
number = 7

def work(): pass

def make_program():
    program = lp.Program("demo")
    with program.group("stages"):
        for _ in range(flags.FLAGS.stages):
            program.add_node(lp.PyNode(work))
    return program

def with_arguments(count): return make_program()

async def waits(): return make_program()
"""

WRONG = {
    "lanch demo.py": (f"no command 'lanch'; did you mean 'launch'? (commands: {', '.join(COMMANDS)})"),
    "launch": "TARGET is needed: the file or module of a program; see `lp_pipe launch --help`",
    "launch dem.py": "no file 'dem.py'; did you mean 'demo.py'?",
    "graph nowhere/demo.py": "no file 'nowhere/demo.py'",
    "launch ./": ". is a folder; name a Python file in it, such as ./program.py",
    "launch no.such.module": "no module 'no.such.module'; a file is given as path/file.py",
    "launch demo.py:make_progam": "demo.py has no 'make_progam'; did you mean 'make_program'?",
    "graph demo:make_progam": "demo has no 'make_progam'; did you mean 'make_program'?",
    "launch json": "json has neither `program` nor `make_program`; name yours: json:NAME",
    "launch demo.py:number": "demo.py:number is of type int, not a Program or a function that returns one",
    "launch demo.py:work": "demo.py:work must return a Program, but returned NoneType",
    "launch demo.py:with_arguments": (
        "demo.py:with_arguments needs -- --count=VALUE; "
        "`lp_pipe launch demo.py:with_arguments -- --help` lists its flags"
    ),
    "launch demo.py:waits": "demo.py:waits is async def, not a Program or a function that returns one",
    "launch demo.py --mode=proces": (
        "unknown mode 'proces'; did you mean 'process'? (modes: thread, process, multi_host)"
    ),
    "launch demo.py --grace=soon": "--grace=soon: give a number of seconds, such as --grace=5",
    "launch demo.py --stages=3": (
        "unknown arguments: --stages=3; flags of the program itself come after `--`: -- --stages=3"
    ),
    "launch demo.py --mdoe=thread": (
        "unknown arguments: --mdoe=thread; did you mean '--mode'? "
        "flags of the program itself come after `--`: -- --mdoe=thread"
    ),
    "schedule 1f1b --stage 4": "unknown arguments: --stage 4; did you mean '--stages'? see `lp_pipe schedule --help`",
    "stop --all": "unknown arguments: --all; see `lp_pipe stop --help`",  # it takes no flags of a program
    "status -- --json": "`lp_pipe status` takes no program flags: leave out -- --json",  # nobody saw it
    "clean --force": "unknown arguments: --force; see `lp_pipe clean --help`",
    "launch demo.py -- --stage=3": (
        "demo.py: Unknown command line flag 'stage'. Did you mean: stages ?; `-- --help` lists the program's flags"
    ),
    "launch demo.py -- --stages=0": (
        "demo.py: flag --stages=0: 0 is not a positive integer; `-- --help` lists the program's flags"
    ),
    "launch demo.py --run-dir=": "--run-dir is empty: for the current folder write --run-dir=.",  # it was this one
    "--json launch demo.py": ("--json is before the command: put options after it, as in lp_pipe launch TARGET --json"),
    "launch -m demo": "give a module by its name alone, without -m: lp_pipe launch package.module",
    "graph demo.py -o graph.png": "-o graph.png: the file's name must end in one of .svg, .dot, .json",
    "graph demo.py -o no/graph.svg": "cannot write no/graph.svg: No such file or directory",
}


@pytest.mark.parametrize("line", WRONG)
def test_wrong_usage_is_one_line_and_exit_status_2(line: str, brief_command: Command, folder: Path) -> None:
    (folder / "demo.py").write_text(TARGET)
    done = brief_command(*line.split())
    assert done.stderr == f"lp_pipe: {WRONG[line]}\n"
    assert (done.returncode, done.stdout) == (2, "")
    assert not (folder / "runs").exists()


def test_help_shows_examples(brief_command: Command) -> None:
    for arguments in ("--help",), ("launch", "--help"), ("graph", "--help"), ("schedule", "--help"):
        done = brief_command(*arguments)
        assert done.returncode == 0
        assert "examples:\n  lp_pipe " in done.stdout


def test_help_takes_no_example_apart(brief_command: Command) -> None:
    """`--srun='--` was at the end of a line, and the description of profile one line of 150 letters."""
    text = brief_command("launch", "--help").stdout
    assert "--srun='--container-image=IMAGE'" in text
    profile = brief_command("profile", "--help").stdout
    assert max(len(line) for line in profile.partition("examples:")[0].splitlines()) <= 100
    assert "several hosts (--links):" in profile  # it named --mode, which profile does not have


def test_the_version_names_lp_pipe_and_python(command: Command) -> None:
    assert command("--version").stdout.startswith("lp_pipe 0.")


def test_a_source_tree_that_is_not_installed_has_the_command_too(tmp_path: Path) -> None:
    # Every command was a PackageNotFoundError: a cluster's image with torch, and lp_pipe's sources on PYTHONPATH.
    packages = Path(numpy.__file__).parents[1]
    for entry in packages.iterdir():
        if not entry.name.lower().startswith("lp_pipe"):
            (tmp_path / entry.name).symlink_to(entry)
    root = Path(lp_pipe.__file__).parents[1]
    run = f"import sys; sys.path[:0] = [{str(root)!r}, {str(tmp_path)!r}]; from lp_pipe.cli.main import main; main()"
    command = [sys.executable, "-I", "-S", "-c", run, "--version"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("lp_pipe not installed (Python 3.")


def test_the_flags_of_the_program_can_be_listed(brief_command: Command, folder: Path) -> None:
    (folder / "demo.py").write_text(TARGET)
    done = brief_command("launch", "demo.py", "--", "--help")
    assert done.returncode == 0
    assert "--stages: How many stages." in done.stdout


def test_flags_that_a_program_does_not_take_are_refused(command: Command, folder: Path) -> None:
    # They were ignored; and `-- --help` started the program.
    plain = 'import lp_pipe as lp\nprogram = lp.Program("plain")\nprogram.add_node(lp.PyNode(print, 1), label="n")\n'
    (folder / "plain.py").write_text(plain)
    done = command("launch", "plain.py", "--mode=thread", "--", "--stages=3")
    assert (done.returncode, done.stderr) == (2, "lp_pipe: plain.py does not take --stages=3; it takes none\n")
    refused = command("launch", "plain.py", "--", "--help")
    assert refused.returncode == 2 and "plain.py does not take --help" in refused.stderr
    (folder / "reads.py").write_text(f"import sys\nassert '--stages=3' in sys.argv\n{plain}")
    assert command("launch", "reads.py", "--mode=thread", "--", "--stages=3").stderr == ""
    (folder / "later.py").write_text(f"import sys\n{plain.replace('print, 1', 'lambda: print(sys.argv[1:])')}")
    done = command("launch", "later.py", "--mode=thread", "--", "--stages=3")
    assert (done.returncode, done.stderr) == (0, "lp_pipe: later.py has not read its flags: --stages=3\n")
    assert "[n/0] ['--stages=3']" in done.stdout


def test_without_arguments_the_help_is_printed(brief_command: Command) -> None:
    bare = brief_command()
    assert (bare.returncode, bare.stderr) == (0, "")
    assert bare.stdout == brief_command("--help").stdout != ""


def test_the_graph_command_writes_several_files_with_the_mode_of_the_umask(
    brief_command: Command, folder: Path
) -> None:
    (folder / "demo.py").write_text(TARGET)
    done = brief_command("graph", "demo.py", "-o", "a.svg", "-o", "a.dot", "-o", "a.json")
    assert (done.returncode, done.stdout) == (0, "wrote a.svg\nwrote a.dot\nwrote a.json\n")
    modes = {(folder / f"a.{ending}").stat().st_mode for ending in ("svg", "dot", "json")}
    assert modes == {(folder / "demo.py").stat().st_mode}


def test_the_graph_command_prints_text_or_writes_a_file(brief_command: Command, folder: Path) -> None:
    (folder / "demo.py").write_text(TARGET)
    assert brief_command("graph", "demo.py", "--", "--stages=3").stdout.startswith("demo: 3 nodes in 1 group")
    for suffix, beginning in (".svg", "<svg "), (".dot", "digraph "), (".json", "{"):
        done = brief_command("graph", "demo:make_program", "-o", f"graph{suffix}")
        assert (done.returncode, done.stdout) == (0, f"wrote graph{suffix}\n")
        assert (folder / f"graph{suffix}").read_text().startswith(beginning)
