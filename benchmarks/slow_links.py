"""A pipeline beside data parallelism, over a fast and a slow link between two emulated hosts, and what was predicted.

Two network namespaces are joined by a link, whose two directions tbf limits. A level's bandwidth counts what a device
sends and receives together, so that of a link of R bytes/s each way is 2 R. The parties are plain processes, of
lp_pipe's stages and channels (`link_party`), so that nothing else, such as a launcher's streams, goes over the link.

Layers sleep instead of computing, so that what is compared with the prediction are the links. The first layer takes
most of the time: with a fast link data parallelism is faster, with a slow one the pipeline.
"""

import base64
import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch

import lp_pipe.pipeline as pp
from benchmarks import namespaces
from benchmarks.link_party import KINDS, Job, layers
from benchmarks.namespaces import Host
from benchmarks.report import show_table, spread
from benchmarks.sleeping import mean, sgd
from lp_pipe.connections.credentials import generate_credentials
from lp_pipe.pipeline.partitioning.cost import CostModel

GOAL = 0.15
LINKS = {"fast": 1.25e9, "slow": 25e6}  # bytes per second, each way
_UNITS = [5, 1, 1, 1]
_UNIT_S = 0.002
_WEIGHTS = 1 << 16  # of each layer: 256 KiB
_ROWS, _WIDTH = 8, 512


def figures(*, is_quick: bool) -> dict[str, Any]:
    """Return what was planned, predicted and measured by link, or why it could not be run."""
    problem = namespaces.why_not()
    if problem:
        return {"skipped": problem}
    microbatches, steps = (4, 2) if is_quick else (32, 5)
    model = pp.Model(lambda: layers([unit * _UNIT_S for unit in _UNITS], _WEIGHTS), mean, sgd)
    profile = pp.profile(model, torch.ones(_ROWS, _WIDTH), torch.ones(_ROWS, 1))
    try:
        with namespaces.two_hosts() as hosts:
            names = ["slow"] if is_quick else list(LINKS)
            return {name: _on_link(hosts, LINKS[name], profile, microbatches, steps) for name in names}
    except subprocess.CalledProcessError as error:
        return {"skipped": f"{' '.join(map(str, error.cmd))}: {error.stderr.strip()}"}


def _on_link(
    hosts: tuple[Host, Host], rate: float, profile: pp.Profile, microbatches: int, steps: int
) -> dict[str, Any]:
    topology = pp.Topology([pp.Level("host", 2, bandwidth=2 * rate)])
    plan = pp.partition(profile, topology, microbatches=microbatches)
    straight = pp.partition(profile, topology, straight=True, microbatches=microbatches)
    compute = sum(layer.forward_s + layer.backward_s for layer in profile.layers)
    parameters = sum(layer.parameter_bytes for layer in profile.layers)
    parallel_s = float(CostModel("pipedream").stage(compute, parameters, 2, topology.levels[0]))
    assert straight.step_seconds is not None, "partition predicts it"
    (cut,) = straight.cuts([layer.name for layer in profile.layers])
    predicted = {"pipeline": straight.step_seconds / microbatches, "data parallel": parallel_s}
    measured = {}
    for host in hosts:
        host.limit(rate)
    for kind in KINDS:
        measured[kind] = _measured(hosts, kind, cut, microbatches, steps)
    ratio = predicted["data parallel"] / predicted["pipeline"]
    pairs = zip(measured["data parallel"]["seconds"], measured["pipeline"]["seconds"], strict=True)
    ratios = spread(parallel / pipeline for parallel, pipeline in pairs)
    fastest = min(measured["data parallel"]["seconds"]) / min(measured["pipeline"]["seconds"])  # nobody disturbed them
    return {
        "bytes_per_s": rate,
        "plan": [{"layers": list(stage.layers), "replicas": stage.replicas} for stage in plan.stages],
        "predicted_ms": {kind: seconds * 1e3 for kind, seconds in predicted.items()},
        "measured_ms": {kind: spread(s * 1e3 for s in one["seconds"]) for kind, one in measured.items()},
        "sent_bytes": {kind: one["sent_bytes"] for kind, one in measured.items()},
        "predicted_bytes": {
            "pipeline": profile.layers[cut - 1].activation_bytes,
            "data parallel": parameters / 2,
        },
        "predicted_ratio": ratio,
        "measured_ratio": ratios,
        "measured_to_predicted_ratio": {"median": ratios["median"] / ratio, "best": fastest / ratio},
    }


def _measured(hosts: Sequence[Host], kind: str, cut: int, microbatches: int, steps: int) -> dict[str, Any]:
    """Return the seconds of a micro-batch in each step, and the bytes that each host has sent for one."""
    job = Job(
        rank=0,
        kind=kind,
        addresses=[host.address for host in hosts],
        credentials=base64.b64encode(generate_credentials().to_bytes()).decode(),
        units_s=[unit * _UNIT_S for unit in _UNITS],
        weights=_WEIGHTS,
        rows=_ROWS,
        width=_WIDTH,
        microbatches=microbatches,
        cut=cut,
        steps=steps,
    )
    with contextlib.ExitStack() as stack:
        parties = [stack.enter_context(_party(host, job._replace(rank=rank))) for rank, host in enumerate(hosts)]
        _all_say(parties, "ready")
        _go(parties)
        _all_say(parties, "warm")
        before = [host.sent_bytes() for host in hosts]
        _go(parties)
        took = [json.loads(_line(party)) for party in parties]
        sent = [host.sent_bytes() - earlier for host, earlier in zip(hosts, before, strict=True)]
        _go(parties)
    longest = [max(pair) for pair in zip(*took, strict=True)]
    return {
        "seconds": [seconds / microbatches for seconds in longest],
        "sent_bytes": [count / (steps * microbatches) for count in sent],
    }


@contextlib.contextmanager
def _party(host: Host, job: Job) -> Iterator["subprocess.Popen[str]"]:
    environment = ("env", f"GLOO_SOCKET_IFNAME={host.device}", "CUDA_VISIBLE_DEVICES=")
    command = host.command(*environment, sys.executable, "-m", "benchmarks.link_party")
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            _say(process, json.dumps(job._asdict()))
            yield process
        finally:
            process.kill()


def _go(parties: Sequence["subprocess.Popen[str]"]) -> None:
    for party in parties:
        _say(party, "go")


def _say(party: "subprocess.Popen[str]", line: str) -> None:
    assert party.stdin is not None, "it is a pipe"
    party.stdin.write(line + "\n")
    party.stdin.flush()


def _all_say(parties: Sequence["subprocess.Popen[str]"], expected: str) -> None:
    for party in parties:
        line = _line(party)
        if line != expected:
            raise SystemExit(f"a party has ended, or says {line!r} instead of {expected!r}; its error is above")


def _line(party: "subprocess.Popen[str]") -> str:
    assert party.stdout is not None, "it is a pipe"
    return party.stdout.readline().strip()


def show(figures: dict[str, Any]) -> None:
    if "skipped" in figures:
        print(f"Slow links: skipped: {figures['skipped']}")
        return
    rows = []
    for name, link in figures.items():
        stages = " | ".join(f"{len(stage['layers'])} layers x {stage['replicas']}" for stage in link["plan"])
        for kind in KINDS:
            sent = "/".join(f"{count:,.0f}" for count in link["sent_bytes"][kind])
            rows.append(
                [
                    f"{name}: {kind}",
                    f"{link['predicted_ms'][kind]:.2f}",
                    f"{link['measured_ms'][kind]['median']:.2f}",
                    f"{link['predicted_bytes'][kind]:,.0f}",
                    sent,
                ]
            )
        share = link["measured_to_predicted_ratio"]
        ratio = f"{link['measured_ratio']['median']:.2f}; of predicted {share['median']:.3f}, best {share['best']:.3f}"
        rows.append([f"{name}: pipeline is faster by", f"{link['predicted_ratio']:.2f}", ratio, "", f"plan: {stages}"])
    columns = ["link", "predicted ms", "measured ms", "predicted bytes", "bytes sent by each host"]
    show_table(f"A micro-batch over links between two hosts; goal: ratio within {GOAL:.0%} of predicted", columns, rows)
