"""Programs that the tests of all engines launch, and how they wait."""

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil

import lp_pipe as lp

WITHIN_S = 30.0
REPOSITORY = Path(__file__).parents[3]


class Probe:
    """Runs small functions inside its node."""

    def ask(self, function: Any, *args: Any) -> Any:
        return function(*args)


_ECHO_SCRIPT = """
import time
import lp_pipe as lp
from lp_pipe.launch.engines import SshEngine

class Echo:
    def echo(self, value):
        return value

program = lp.Program("orphans")
with program.group("echo"):
    for _ in range(2):
        program.add_node(lp.CourierNode(Echo))
with lp.launch(program, "multi_host", {options}) as run:
    for index in range(2):
        run.client("echo", index).echo(1)
    print("ready", flush=True)
    {then}
"""


def echo_script(options: str = "", then: str = "run.wait()") -> str:
    """Return a script that launches two servers, prints "ready", and waits for its end.

    options, then: Python source of the options of the launch, and of what follows it.
    """
    return _ECHO_SCRIPT.format(options=options, then=then)


def probes(count: int = 2, **resources: Any) -> lp.Program:
    program = lp.Program("probes")
    with program.group("probe", resources=lp.Resources(**resources)):
        for _ in range(count):
            program.add_node(lp.CourierNode(Probe))
    return program


def grown(run: lp.ElasticRun, num_hosts: int) -> bool:
    """Return whether an elastic run has so many hosts; if not, save a checkpoint, with which it may grow."""
    folder = run.run_dir / "checkpoints"
    if run.num_hosts != num_hosts:
        (folder / f"step-{len(list(folder.glob('*'))) + 1:08}").mkdir(parents=True)
    return run.num_hosts == num_hosts


def asking(count: int, variable: str) -> lp.Program:
    """Nodes, one of which asks the others for an environment variable, prints it, and stops the program."""

    def ask_all(probes: list[Any]) -> None:
        print("they say", *[probe.ask(os.getenv, variable) for probe in probes])
        lp.stop()

    program = probes(count)
    handles = [node.create_handle() for node in program.groups["probe"]]
    program.add_node(lp.PyNode(ask_all, handles), label="asking")
    return program


def trained(mode: str, channel: str = "auto", **options: Any) -> str:
    """Return the fingerprint of a pipeline's parameters after some steps."""
    # Nodes of programs without a pipeline import this file, and torch would take them a second.
    import torch

    import lp_pipe.pipeline as pp

    model = pp.Model(
        [pp.Layer(torch.nn.Linear, 8, 8), pp.Layer(torch.nn.Tanh), pp.Layer(torch.nn.Linear, 8, 8)],
        torch.nn.functional.mse_loss,
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    program = lp.Program("pipeline")
    handle = pp.add_pipeline(program, model, stages=2, microbatches=4, channel=channel)
    inputs = torch.arange(64.0).reshape(8, 8) / 64
    with lp.launch(program, mode, **options) as run:
        client = run.client(handle)
        for _ in range(3):
            client.step((inputs, inputs.flip(0)))
        found: str = client.fingerprint()
    return found


def char_gpt(folder: Path, mode: str, *flags: str) -> str:
    """Return the example's line about its parameters after three steps, launched as users do."""
    small = ("--seed=1", "--width=24", "--layers=2", "--heads=2", "--batch_size=8", "--context=32", "--sample_length=5")
    command = [
        sys.executable,
        "-m",
        "lp_pipe",
        "launch",
        str(REPOSITORY / "examples" / "char_gpt.py"),
        f"--mode={mode}",
    ]
    done = subprocess.run(
        [*command, *flags, "--", *small, "--steps=3", "--stages=2"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = re.findall(r"parameters sha256 ([0-9a-f]{64})", done.stdout)
    return str(found)


def agents() -> dict[str, psutil.Process]:
    """Return the agents on this machine, by the name of their host."""
    found = {}
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if words[1:4] == ["-m", "lp_pipe", "agent"] and "--name" in words:  # one that engines start
            found[words[words.index("--name") + 1]] = process
    return found


def agent_of(host: str) -> psutil.Process:
    """Return the agent of a host, which this process has started."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # another one may end at any moment
            if child.status() != psutil.STATUS_ZOMBIE and f"--name {host} " in " ".join(child.cmdline()):
                found.append(child)
    (agent,) = found
    return agent


def are_gone(pids: Iterable[int]) -> bool:
    return not any(map(is_running, pids))


def is_running(pid: int) -> bool:
    """Return whether the process is there; a zombie is not. It may end at any moment."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def seen_by_others(text: str) -> list[int]:
    """Return the processes in whose command line or environment the secret is."""
    found = []
    for pid in psutil.pids():
        for name in ("cmdline", "environ"):
            try:
                data = Path(f"/proc/{pid}/{name}").read_bytes()
            except OSError:
                continue
            found += [pid] * (text.encode() in data)
    return found
