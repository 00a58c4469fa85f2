"""`lp_pipe schedule`: timelines and comparisons, called in this process; no torch is needed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from lp_pipe.cli.main import main
from lp_pipe.pipeline.partitioning import LayerProfile, Profile
from lp_pipe.pipeline.schedule import Costs, Schedule, make_schedule, schedules

SMALL = ["--stages", "2", "--microbatches", "2"]


def test_a_timeline_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", "1f1b", *SMALL]) == 0
    assert capsys.readouterr().out == (
        "worker 0 |F0 F1       B0---    B1--- |\n"
        "worker 1 |   F0 B0--- F1 B1---       |\n"
        "9 s, bubble 33.3%, peak activations 2 1\n"
    )


def test_a_timeline_is_written_in_every_format(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", "1f1b", *SMALL, *(f"-o=x{end}" for end in (".svg", ".csv", ".json", ".txt"))]) == 0
    printed, wrote = capsys.readouterr().out.split("wrote", maxsplit=1)
    assert wrote.split() == ["x.svg", "wrote", "x.csv", "wrote", "x.json", "wrote", "x.txt"]
    assert (folder / "x.svg").read_text().startswith("<svg ")
    assert Schedule.from_csv((folder / "x.csv").read_text(), "1f1b") == make_schedule("1f1b", 2, 2)
    assert len(json.loads((folder / "x.json").read_text())["traceEvents"]) == 6 + 8
    assert (folder / "x.txt").read_text() == printed


def test_a_file_in_torchs_format_knows_its_numbers(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.csv").write_text(make_schedule("gpipe", 2, 2).to_csv())
    assert main(["schedule", "mine.csv", "--stages=2"]) == 0
    assert "worker 1 |   F0 F1 B0--- B1---" in capsys.readouterr().out


def test_costs_and_links_stretch_the_timeline(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Costs(forward=[1, 2], backward_input=0.5, backward_weight=0).save("costs.json")
    assert main(["schedule", "gpipe", "--stages=2", "--microbatches=1", "--costs=costs.json", "--links=0.25"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("4.5 s, ")


def test_auto_is_searched_with_these_costs_and_this_limit(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Costs(forward=[1, 3], backward_input=1, backward_weight=2).save("costs.json")
    assert main(["schedule", "auto", "--stages=2", "--microbatches=3", "--costs=costs.json", "--memory=1"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("peak activations 1 1")


def test_all_schedules_are_compared(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", "--compare", "--stages=3", "--microbatches=4", "-o=all.json", "-o=all.txt"]) == 0
    text = capsys.readouterr().out.partition("wrote ")[0]
    head, *lines = text.splitlines()
    assert head.split() == ["SCHEDULE", "CHUNKS", "MAKESPAN", "BUBBLE", "PEAK", "ACTIVATIONS"]
    assert lines[0].startswith("auto")
    assert "  dualpipev: " in text.partition("Left out:")[2]
    assert (folder / "all.txt").read_text() == text
    events = json.loads((folder / "all.json").read_text())["traceEvents"]
    processes = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert {"1f1b, chunks=1", "zbv, chunks=2", "auto, chunks=1", "auto, chunks=2"} <= processes


def test_the_comparison_may_be_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.csv").write_text(make_schedule("gpipe", 2, 2).to_csv())
    assert main(["schedule", "mine.csv", "--compare", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert set(result["ranked"][0]) == {"name", "chunks", "makespan_s", "bubble", "peak_activations", "of_named"}
    ranked = {party["name"] for party in result["ranked"]}
    assert ranked | set(result["left_out"]) == {*schedules(), "mine"}


def test_a_named_schedule_is_what_the_others_are_compared_with(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The name was ignored, even that of a schedule which does not exist for these numbers."""
    compare = ["schedule", "gpipe", "--compare", "--stages=3", "--microbatches=4"]
    assert main(compare) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert "MAKESPAN  OF gpipe  BUBBLE" in head
    shares = {line.split()[0]: line.split()[4] for line in lines if "%" in line}
    assert shares["gpipe"] == shares["1f1b"] == "100.0%"
    assert float(shares["zb_h1"].rstrip("%")) < 100
    assert main([*compare, "--json"]) == 0
    ranked = json.loads(capsys.readouterr().out)["ranked"]
    assert {party["of_named"] for party in ranked if party["name"] == "gpipe"} == {1.0}


def test_a_file_that_is_called_like_a_schedule_has_its_own_place(folder: Path) -> None:
    """Two timelines had one name, of which only the last was in the trace."""
    Path("1f1b.csv").write_text(make_schedule("gpipe", 2, 3).to_csv())
    assert main(["schedule", "1f1b.csv", "--compare", "-o=all.json"]) == 0
    events = json.loads(Path("all.json").read_text())["traceEvents"]
    processes = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert {"1f1b, chunks=1", "1f1b.csv, chunks=1"} <= processes


def test_a_spreadsheets_mark_and_line_ends_are_no_part_of_the_schedule(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("mine.csv").write_bytes(b"\xef\xbb\xbf0F0,0B0\r\n1F0,1B0\r\n")
    assert main(["schedule", "mine.csv"]) == 0
    assert capsys.readouterr().out.endswith("6 s, bubble 50.0%, peak activations 1 1\n")


def test_costs_of_next_to_no_time_are_drawn_as_none(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Costs(forward=1e-320, backward_input=1e-320, backward_weight=0).save("costs.json")
    assert main(["schedule", "1f1b", *SMALL, "--costs=costs.json", "-o=x.svg"]) == 0
    assert "worker 0 ||" in capsys.readouterr().out


@pytest.mark.parametrize("redirection", [">/dev/full", ">&-"])
def test_no_traceback_where_nothing_can_be_printed(redirection: str) -> None:
    command = f"{sys.executable} -m lp_pipe schedule 1f1b --stages 2 --microbatches 2 {redirection}"
    ended = subprocess.run(command, shell=True, timeout=60, check=False, capture_output=True, text=True)
    assert "Traceback" not in ended.stderr
    assert ended.returncode == (3 if "full" in redirection else 0)


def profile_of_four_layers() -> Profile:
    """The first takes twice as long as each of the others, and half of each backward is for the weights."""
    times = ((2, 4, 2), (1, 2, 1), (1, 2, 1), (1, 2, 1))
    return Profile(tuple(LayerProfile(f"{i}", f, b, 1, 1, backward_weight_s=w) for i, (f, b, w) in enumerate(times)))


def test_costs_may_be_a_profile(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile_of_four_layers().save("profile.json")
    two = Costs(forward=[2, 3], backward_input=[2, 3], backward_weight=[2, 3])
    two.save("costs.json")
    for name in ("1f1b", "zb_h1", "auto"):
        assert main(["schedule", name, *SMALL, "--costs=profile.json"]) == 0
        drawn = capsys.readouterr().out
        assert main(["schedule", name, *SMALL, "--costs=costs.json"]) == 0
        assert drawn == capsys.readouterr().out


def test_all_schedules_are_compared_by_a_profile_each_with_its_own_cuts(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile_of_four_layers().save("profile.json")
    assert main(["schedule", "--compare", "--stages=2", "--microbatches=4", "--costs=profile.json", "--json"]) == 0
    ranked = {
        (party["name"], party["chunks"]): party["makespan_s"] for party in json.loads(capsys.readouterr().out)["ranked"]
    }
    assert ranked["gpipe", 1] == 4 * 9 + 6
    assert ranked["auto", 2] <= ranked["zbv", 2] < ranked["gpipe", 1]
    assert main(["schedule", "--compare", "--stages=3", "--microbatches=6", "--costs=profile.json"]) == 0
    assert "  zbv: the profile: cannot cut 4 layers into 6 stages" in capsys.readouterr().out


WRONG = {
    "schedule": "no schedule is given: give one of 1f1b, auto, ",
    "schedule 1f1b --stages 2": "--microbatches is missing: give a number, such as --microbatches 4",
    "schedule 1fb --stages 2 --microbatches 2": "no schedule '1fb': did you mean '1f1b'? There are 1f1b, ",
    "schedule Schedule1F1B --stages 2 --microbatches 2": "no schedule 'Schedule1F1B': did you mean '1f1b'?",
    "schedule 1f1b --stages 0 --microbatches 2": "schedule '1f1b' with stages=0: ",
    "schedule dualpipev --stages 4 --microbatches 1": (
        "schedule 'dualpipev' with stages=4 and microbatches=1: it needs a micro-batch for each of its 8 virtual "
        "stages: use microbatches=8 or more"
    ),
    "schedule gpipe --stages 2 --microbatches 3 --memory 2": "schedule 'gpipe': worker 0, position 2, ",
    "schedule 1f1b --stages 2 --microbatches 2 --costs no.json": "no.json: cannot read costs: ",
    "schedule 1f1b --stages 2 --microbatches 2 --costs three.json": "costs.forward has 3 numbers: ",
    "schedule 1f1b --stages 2 --microbatches 2 --links -1": "links is -1.0: give seconds of at least 0",
    "schedule 1f1b --stages 2 --microbatches 2 -o x.png": "-o x.png: the file's name must end in one of .svg, ",
    "schedule 1f1b --stages 2 --microbatches 2 -o no/x.svg": "cannot write no/x.svg: No such file or directory",
    "schedule 1f1b --stages 2 --microbatches 2 --json": "--json needs --compare; ",
    "schedule --compare --stages 2 --microbatches 2 -o x.svg": "-o x.svg: with --compare the file's name must ",
    "schedule no.csv": "cannot read no.csv: ",
    "schedule wrong.csv": "wrong.csv: line 1, cell 1: 'hello' is not an action: ",
    "schedule mine.csv --stages 3": "mine.csv has stages=2: leave out --stages=3",
    "schedule mine.csv --chunks 3": "mine.csv has 2 virtual stages on 2 workers: leave out --chunks=3",
    "schedule half.csv": "schedule 'half': worker 0, position 1, action 0B0: is missing: add it",
    "schedule 1f1b --stages 2 --microbatches 2 --links inf": "links is inf: give seconds of at least 0, and 1e+100 at ",
    "schedule 1f1b --stages 2 --microbatches 2 --costs huge.json": "costs.forward is inf: give seconds of at least 0, ",
    "schedule 1f1b --stages 2 --microbatches 2 --costs deep.json": "deep.json: cannot read costs: ",
    "schedule 1f1b --stages 2 --microbatches 2 --memory -1": "schedule '1f1b': memory=-1: ",
    "schedule 1f1b --stages 2000000 --microbatches 1000000": "--stages 2000000 and --microbatches 1000000 make ",
    "schedule dualpipev --compare --stages 2 --microbatches 2": "schedule 'dualpipev' with stages=2 and ",
    "schedule forward --compare --stages 2 --microbatches 2": "schedule 'forward' has no backwards: ",
    "schedule --compare --stages 0 --microbatches 2": "a comparison with stages=0: ",
    "schedule --compare --stages 2 --microbatches 2 --chunks 0": "a comparison with chunks=0: ",
    "schedule auto --stages 2 --microbatches 2 --chunks 0": "schedule 'auto' with chunks=0: ",
    f"schedule {'a' * 300} --stages 2 --microbatches 2": "no schedule 'aaa",
    "schedule 1f1b --stages 5 --microbatches 2 --costs profile.json": "the profile: cannot cut 4 layers into 5 stages",
    "schedule 1f1b --stages 2 --microbatches 2 --costs layers.json": "layers.json: layers: ",
    "schedule digits.csv": f"digits.csv: line 1, cell 1: '{'9' * 40}' is not an action: ",
    "schedule long.csv": "long.csv: line 1: field larger than field limit (131072)",
    "schedule slip.csv": "schedule 'slip': worker 1, position 3, action 1B1: 1F1 has not run yet: ",
}


@pytest.mark.parametrize("line", WRONG)
def test_wrong_usage_is_one_line_and_exit_status_2(line: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("wrong.csv").write_text("hello\n")
    Path("mine.csv").write_text(make_schedule("gpipe", 2, 2).to_csv())
    Path("half.csv").write_text("0F0\n1F0,1B0\n")
    Path("digits.csv").write_text("9" * 5_000 + "F0,0B0\n")  # more than int() takes
    Path("long.csv").write_text("9" * 200_000 + "F0,0B0\n")  # more than the csv module takes
    Path("slip.csv").write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F11,1B1\n")
    Path("huge.json").write_text('{"forward": 1' + "0" * 400 + ', "backward_input": 1, "backward_weight": 1}')
    profile_of_four_layers().save("profile.json")
    Path("layers.json").write_text('{"layers": 4}')
    Path("deep.json").write_text("[" * 100_000)
    Costs(forward=[1, 1, 1], backward_input=1, backward_weight=1).save("three.json")
    assert main(line.split()) == 2
    output = capsys.readouterr()
    assert output.err.startswith(f"lp_pipe: {WRONG[line]}")
    assert (output.out, output.err.count("\n")) == ("", 1)


def test_torch_is_not_loaded(folder: Path) -> None:
    code = (
        "import sys; from lp_pipe.cli.main import main; "
        "assert main(['schedule', '--compare', '--stages=2', '--microbatches=2']) == 0; "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True, capture_output=True)
