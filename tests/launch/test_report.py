"""A failure in at most 15 lines, of which the printer of the report adds one."""

from pathlib import Path

from lp_pipe.errors import NodeError
from lp_pipe.launch.report import MAX_LINES, failure_report

TRACEBACK = (
    'Traceback (most recent call last):\n  File "/home/me/train.py", line 3, in run\n    go()\nValueError: too hot\n'
)


def test_the_report_names_node_host_error_lines_and_logs() -> None:
    error = NodeError("trainer", 0, "ValueError", "too hot", TRACEBACK)
    report = failure_report(
        error, host="h1", later_failures=2, log_path=Path("runs/x/logs/trainer-0.log"), folder=Path("/home/me")
    )
    assert report.splitlines() == [
        "node trainer/0 on h1 failed: ValueError: too hot",
        "  train.py:3 in run:  go()",
        "  later failures, left out here: 2",
        "  all its output: runs/x/logs/trainer-0.log",
    ]


def test_the_report_has_the_notes_which_say_where_in_a_pipeline_it_was() -> None:
    """Shapes that do not fit fail in torch's frames alone: without the notes nothing said in which layer."""
    message = "stages/0.step() raised ValueError: too hot\nby far"
    told = f"{TRACEBACK}by far\nin layer 3.Linear\nin stages/0, step 7\n"
    error = NodeError("trainer", 0, "ValueError", message, told)
    assert failure_report(error, folder=Path("/home/me")).splitlines() == [
        "node trainer/0 failed: ValueError: stages/0.step() raised ValueError: too hot",
        "  by far",
        "  in layer 3.Linear",
        "  in stages/0, step 7",
        "  train.py:3 in run:  go()",
    ]


def test_a_killed_process_shows_how_it_died_and_its_last_lines() -> None:
    error = NodeError("stages", 1, "ProcessDied", "the process was killed by SIGKILL", "The process left no traceback")
    assert failure_report(error, last_lines=["step 1", "step 2"]).splitlines() == [
        "node stages/1 failed: ProcessDied: the process was killed by SIGKILL",
        "  its last lines:",
        "    step 1",
        "    step 2",
    ]


def test_a_crash_shows_its_python_stack_from_the_innermost_call_outwards() -> None:
    frames = "".join(f'  File "/home/me/train.py", line {line}, in f{line}\n' for line in range(9, 0, -1))
    text = (
        "The process raised no exception; its last lines:\n  epoch 1\n  epoch 2\nTraceback (most recent call last):\n"
        f'{frames}  File "/x/site-packages/torch/ops.py", line 5, in call\nFatal Python error: Segmentation fault'
    )
    error = NodeError("n", 0, "ProcessDied", "the process was killed by SIGSEGV", text)
    assert failure_report(error, log_path=Path("n-0.log"), folder=Path("/home/me")).splitlines() == [
        "node n/0 failed: ProcessDied: the process was killed by SIGSEGV",
        "  its last lines:",
        "    epoch 1",
        "    epoch 2",
        "  where it crashed, 1 frame of torch further in, innermost call first:",
        *(f"    train.py:{line} in f{line}" for line in range(1, MAX_LINES - 6)),
        f"    … {16 - MAX_LINES} lines left out",
        "  all its output: n-0.log",
    ]


def test_deep_recursion_and_long_messages_stay_short() -> None:
    frame = '  File "/home/me/train.py", line 3, in run\n    go()\n'
    deep = f"Traceback (most recent call last):\n{frame * 500}RecursionError: too deep\n"
    error = NodeError("trainer", 0, "RecursionError", "too deep\n" * 50, deep)
    lines = failure_report(error, later_failures=1, log_path=Path("x.log")).splitlines()
    assert len(lines) == MAX_LINES
    assert "  … 493 lines left out" in [line[2:] for line in lines]
    assert lines[-3] == "  /home/me/train.py:3 in run:  go()"


def test_many_last_lines_are_cut_to_the_newest() -> None:
    error = NodeError("stages", 1, "ProcessDied", "the process was killed by SIGKILL")
    lines = failure_report(error, last_lines=[f"step {number}" for number in range(20)]).splitlines()
    assert len(lines) <= MAX_LINES
    assert lines[-1] == "    step 19"


def test_a_traceback_in_the_message_is_told_by_its_end_and_the_users_frames() -> None:
    """Regression: an error in a DataLoader's worker was cut behind the first line of its traceback."""
    message = (
        "feeder/0.batch() raised ValueError: Caught ValueError in DataLoader worker process 0.\n"
        "Original Traceback (most recent call last):\n"
        '  File "/x/site-packages/torch/utils/data/_utils/fetch.py", line 54, in fetch\n'
        "    data = self.dataset[idx]\n"
        '  File "/home/me/data.py", line 9, in __getitem__\n'
        "    raise ValueError(index)\n"
        "ValueError: sample 300 is damaged\n"
    )
    error = NodeError("trainer", 0, "ValueError", message, f"{TRACEBACK}{message}in the feeder's batch(18)\n")
    assert failure_report(error, folder=Path("/home/me")).splitlines() == [
        "node trainer/0 failed: ValueError: feeder/0.batch() raised ValueError: Caught ValueError in DataLoader worker"
        " process 0.",
        "  ValueError: sample 300 is damaged",
        "  data.py:9 in __getitem__:  raise ValueError(index)",
        "  in the feeder's batch(18)",
        "  train.py:3 in run:  go()",
    ]
