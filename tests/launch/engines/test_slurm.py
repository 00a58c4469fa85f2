"""The commands and outputs of the slurm engine; test_slurm_cluster.py has the real one."""

import pytest

import lp_pipe as lp
from lp_pipe.launch.engines import HostOffer, SlurmEngine, StartedAgent
from lp_pipe.launch.engines.slurm import JobState, SlurmTask, features, offers, read_state, sbatch_arguments, script


def test_hosts_offer_what_the_allocation_has_of_them() -> None:
    environment = {"SLURM_JOB_CPUS_PER_NODE": "16(x2),8", "SLURM_GPUS_PER_NODE": "a100:2", "SLURM_MEM_PER_NODE": "4096"}
    assert offers(["a", "b", "c"], environment) == [
        HostOffer("a", cpus=16, gpus=2, memory=4 << 30),
        HostOffer("b", cpus=16, gpus=2, memory=4 << 30),
        HostOffer("c", cpus=8, gpus=2, memory=4 << 30),
    ]


def test_memory_may_be_counted_by_cores_and_what_slurm_does_not_say_is_the_agents_to_find() -> None:
    assert offers(["a"], {"SLURM_JOB_CPUS_PER_NODE": "4", "SLURM_MEM_PER_CPU": "1024"}) == [
        HostOffer("a", cpus=4, memory=4 << 30)
    ]
    assert offers(["a", "b"], {}) == [HostOffer("a"), HostOffer("b")]


def test_the_active_features_of_hosts_are_read_from_what_scontrol_prints() -> None:
    text = (
        "NodeName=node1 Arch=x86_64 CoresPerSocket=4 AvailableFeatures=ib,fast,slow ActiveFeatures=ib,fast "
        "Comment=with ActiveFeatures=none\n"
        "NodeName=node2 Arch=x86_64 CoresPerSocket=4 AvailableFeatures=(null) ActiveFeatures=(null) Gres=gpu:2\n"
    )
    assert features(text) == {"node1": frozenset({"ib", "fast"}), "node2": frozenset()}


@pytest.mark.parametrize(("text", "count"), [("2", 2), ("a100:2,v100:1", 3), ("a100", 1)])
def test_gpus_are_counted_over_their_kinds(text: str, count: int) -> None:
    (offer,) = offers(["a"], {"SLURM_JOB_CPUS_PER_NODE": "4", "SLURM_GPUS_PER_NODE": text})
    assert offer.gpus == count


class _Step(StartedAgent):
    """srun, as far as a task looks at it."""

    def __init__(self, *lines: str, ended: str | None = None) -> None:
        super().__init__(["a"])
        self.lines, self.ended, self.is_killed = list(lines), ended, False

    def how_it_ended(self) -> str | None:
        return self.ended

    def last_lines(self) -> list[str]:
        return self.lines

    def kill(self) -> None:
        self.is_killed = True


@pytest.mark.parametrize(
    ("line", "ended"),
    [
        ("srun: error: node3: task 2: Exited with exit code 3", [None, None, "srun: Exited with exit code 3"]),
        ("srun: error: node[1,3]: tasks 0,2: Killed", ["srun: Killed", None, "srun: Killed"]),
        ("srun: error: node[1-2]: tasks 0-1: Terminated", ["srun: Terminated", "srun: Terminated", None]),
        ("1: srun: error: node3: task 2: Killed", [None, None, None]),  # printed by a task, which may print anything
    ],
)
def test_srun_says_which_tasks_have_ended_while_the_others_run(line: str, ended: list[str | None]) -> None:
    step = _Step("2: hello", line)
    assert [SlurmTask(f"node{number + 1}", number, step, set()).how_it_ended() for number in range(3)] == ended


def test_when_srun_ends_all_its_tasks_have() -> None:
    step = _Step("srun: error: Unable to create step: Invalid credential", ended="exit status 1")
    task = SlurmTask("node1", 0, step, set())
    assert task.how_it_ended() == "srun: exit status 1"
    assert task.last_lines() == ["srun: error: Unable to create step: Invalid credential"]


def test_a_task_has_its_own_lines_and_those_of_srun_but_not_how_others_ended() -> None:
    step = _Step("01: mine: yes", "10: another's", "srun: error: node1: task 0: Killed", "srun: both")
    assert SlurmTask("node2", 1, step, set()).last_lines() == ["mine: yes", "srun: both"]


def test_a_step_is_killed_with_the_last_of_its_tasks() -> None:
    step, in_use = _Step(), {"node1", "node2"}
    first, second = SlurmTask("node1", 0, step, in_use), SlurmTask("node2", 1, step, in_use)
    first.kill()
    first.kill()
    assert not step.is_killed
    second.kill()
    assert step.is_killed


def test_outside_an_allocation_the_error_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    program = lp.Program("nothing")
    program.add_node(lp.PyNode(abs, 1), label="nothing")
    with pytest.raises(lp.LaunchError, match=r"not inside a Slurm allocation.* salloc or sbatch"):
        lp.launch(program, "multi_host", engine="slurm", hosts="2")


def test_limits_of_hosts_are_options_of_this_engine() -> None:
    with pytest.raises(ValueError, match=r"hosts='2:gpus=4'.* gpus_per_host"):
        SlurmEngine("2:gpus=4")


def test_what_sbatch_is_told_ends_with_the_users_own_words() -> None:
    options = {"partition": "gpu", "time": "1:00:00", "gpus_per_host": "4", "sbatch": "--mem=0 --comment='a b'"}
    found = sbatch_arguments("job", "4", "/here/slurm-%j.out", options)
    assert found[2:] == [
        *("--nodes=4", "--ntasks-per-node=1", "--no-kill", "--exclusive", "--gpus-per-node=4"),
        *("--partition=gpu", "--time=1:00:00", "--mem=0", "--comment=a b"),
    ]
    by_name = sbatch_arguments("job", "node[1-2]", "out", {"cpus_per_host": "8"})
    assert "--nodelist=node[1-2]" in by_name and "--cpus-per-task=8" in by_name and "--exclusive" not in by_name


def test_the_script_runs_the_command_word_by_word() -> None:
    assert script(["python", "-m", "x", "a b"]) == "#!/bin/sh\nexec python -m x 'a b'\n"


@pytest.mark.parametrize(
    ("text", "state", "words"),
    [
        (
            "JobId=3 JobName=x JobState=PENDING Reason=Resources ExitCode=0:0 NodeList=(null)",
            JobState("PENDING", reason="Resources"),
            "PENDING (Resources)",
        ),
        (
            "JobId=3 JobState=RUNNING Reason=None ExitCode=0:0 NodeList=node[1-2] BatchHost=node1",
            JobState("RUNNING", hosts="node[1-2]"),
            "RUNNING on node[1-2]",
        ),
        (
            "JobState=FAILED Reason=NonZeroExitCode ExitCode=3:0 NodeList=a",
            JobState("FAILED", "NonZeroExitCode", "a", 3),
            "FAILED (NonZeroExitCode) on a",
        ),
        ("JobState=CANCELLED Reason=None ExitCode=0:15", JobState("CANCELLED", status=143), "CANCELLED"),
    ],
)
def test_the_state_of_a_job_is_read_from_what_scontrol_prints(text: str, state: JobState, words: str) -> None:
    found = read_state(text + "\n")
    assert found == state and str(found) == words


def test_a_job_has_begun_until_it_has_ended() -> None:
    assert not JobState("PENDING").has_begun
    assert JobState("RUNNING").has_begun and not JobState("RUNNING").has_ended
    assert JobState("COMPLETING").has_begun and not JobState("COMPLETING").has_ended
    assert JobState("TIMEOUT").has_ended


def test_a_job_that_slurm_does_not_know_has_no_state() -> None:
    assert read_state("slurm_load_jobs error: Invalid job id specified") is None
