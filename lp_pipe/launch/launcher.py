"""`launch`: from a program to a run, in any mode."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lp_pipe.connections.resource_limits import describe_error, is_limit_reached
from lp_pipe.errors import LaunchError
from lp_pipe.graph import GraphView
from lp_pipe.launch import mixed, process
from lp_pipe.launch.control import ControlPoint
from lp_pipe.launch.coordination.coordinator import Coordinator
from lp_pipe.launch.hangs.hang_watch import HangWatch
from lp_pipe.launch.host import Host
from lp_pipe.launch.hosts.edges import check_channels_of_one_host
from lp_pipe.launch.invocation import current_invocation
from lp_pipe.launch.open_metrics import OpenMetricsServer
from lp_pipe.launch.options import LaunchOptions, with_keywords
from lp_pipe.launch.plan.launch_plan import LaunchPlan, make_plan, serialize_nodes
from lp_pipe.launch.refusal import check_not_refused
from lp_pipe.launch.report import print_reports
from lp_pipe.launch.run import Run
from lp_pipe.launch.run_dir import make_run_dir
from lp_pipe.launch.tracing import Tracer, check_is_not_traced
from lp_pipe.program import Program
from lp_pipe.telemetry.metrics import MetricsLog
from lp_pipe.telemetry.otel import OpenTelemetryExporter
from lp_pipe.telemetry.sink_threads import SinkRun

if TYPE_CHECKING:  # most launches are of one host, and do not need what is for several
    from lp_pipe.launch.hosts.host_join import MultiHostOptions


_MakeHost = Callable[[LaunchPlan, MetricsLog, "MultiHostOptions | None"], tuple[Host, Coordinator]]


def _on_many_hosts(
    plan: LaunchPlan, metrics: MetricsLog, options: "MultiHostOptions | None"
) -> tuple[Host, Coordinator]:
    from lp_pipe.launch import multi_host

    assert options is not None
    return multi_host.make_host(plan, metrics, options)


MODES: dict[str, _MakeHost] = {
    "thread": lambda plan, metrics, options: mixed.make_host(plan, metrics),
    "process": lambda plan, metrics, options: process.make_host(plan, metrics),
    "multi_host": _on_many_hosts,
}


@dataclass(frozen=True)
class _RunOptions(LaunchOptions):
    mode: str = "process"


@with_keywords(_RunOptions)
def launch(program: Program, options: _RunOptions) -> Run:
    """Start every node of `program` and return at once.

    Call `.wait()` on the result, or use it in a `with` block. A script that ends without either waits for the program,
    and its exit status is 1 if a node fails. After an uncaught exception, in an interactive session and in a test, the
    program is stopped when the interpreter exits.

    mode: "thread" (nodes are threads of this process: unit tests, pdb), "process" (one process each on this host), or
        "multi_host" (on the hosts of an engine). Inner nodes of a MultiProcessingColocation are processes in all.
    grace: seconds between the stop and SIGTERM.
    serialize_py_nodes: check that every node pickles, also in thread mode (process mode always does).
    run_dir: folder for logs, metrics, checkpoints; default: a new one under $LP_PIPE_RUNS or the user's state folder.
    metrics_sinks: called with every MetricsRecord that a node logs: those of `lp.sinks`, or any functions. Each has a
        thread and a queue of 10,000; what a slow or failing one leaves out is counted, and said at the end.
    listed: whether `lp_pipe ps`, `status`, `stop`, `stacks` find it from another terminal; default: unless mode is
        "thread": its programs are mostly unit tests (1 ms each, 5 ms when listed).
    hang_after: seconds from which on a node's wait for another one (its server, a reply, a channel) is reported, in
        the log and in the run's hangs.log, with what that one does; deadlocks are named. None: never. The program
        goes on in any case.
    trace: write what all nodes do, from the beginning to the end, to RUN/trace.json, which ui.perfetto.dev shows.
    otel: export OpenTelemetry spans of calls, handlers and steps, as the variables OTEL_EXPORTER_OTLP_… say, or to the
        TracerProvider that the script has set. Needs the extra `otel`.
    metrics_port: serve the run's state as OpenMetrics at http://127.0.0.1:PORT/metrics, `run.metrics_url`; 0: any port.
    setup: called without arguments in every process of the program, before anything of its node is loaded, and again
        where a node is restarted; in thread mode once, here. Its exception is the failure of that node.
    engine, hosts, engine_options (multi_host, like all below): what starts an agent on each host, "local", "ssh",
        "manual", "slurm" (inside an allocation), "ray", "kubernetes" or one that a package adds; which hosts, as
        "h1,h2:gpus=4", a list of such, or a file (local, slurm, ray: or how many); and its own options.
    listen: the address (or "NAME@ADDRESS") by which the hosts reach this one; default: found out.
    interface: of every host, by name or address, by which the others reach it; default: that towards the launcher.
    transport: what carries all traffic between hosts, "tls" (TLS 1.3 sockets, also "auto") or "grpc" (gRPC streams with
        mTLS, for networks that let only HTTP/2 pass). It is encrypted and authenticated in both cases.
    sync: a folder of sources that every host gets; what it has already is not sent again. Nodes whose launcher's folder
        or import path is inside find it in the copy, and modules in it are imported there; others travel by value.
    join_timeout: seconds for all hosts to join. host_timeout: a host that is silent for so long counts as lost, to
        the launcher and to the other hosts.

    Raises:
        TypeError: not a Program, setup cannot be called, or a node's constructor does not take its arguments.
        ValueError: unknown mode or engine, empty program, a handle of another program's node, more resources than the
            hosts have, hang_after that is not positive, grace that is negative.
        SerializationError: setup, or a part of a node, cannot be sent to the processes; nothing was started.
        LaunchError: a host has not joined, or not got the sources, or a process could not be started, or there are no
            more threads or file descriptors to be had, run_dir cannot be made, or a run that has not ended is in it;
            nothing is left running.
    """
    check_not_refused()
    check_program(program, "launch takes a Program")
    mode, host_options = options.mode, None
    if mode not in MODES:
        raise ValueError(f"unknown launch mode {mode!r}; known modes: {', '.join(MODES)}")
    if mode == "multi_host":
        from lp_pipe.launch.hosts.host_join import MultiHostOptions

        host_options = MultiHostOptions.of(options)
    elif options.needs_hosts:
        raise ValueError(
            f"mode={mode!r} has one host; engine, hosts, listen, interface, transport and sync are for 'multi_host'"
        )
    if options.serialize_py_nodes:
        serialize_nodes(make_plan(program, Path(), options.grace))
    with _naming_shortage(program):
        folder = make_run_dir(program.name, options.run_dir)
        return start_run(program, mode, host_options, folder, options)


def start_run(
    program: Program,
    mode: str,
    host_options: "MultiHostOptions | None",
    run_dir: Path,
    options: LaunchOptions,
) -> Run:
    """Start the program in its folder, as `launch` does.

    If the folder was not asked for, a run that is not listed keeps no records, and its folder only if something is in
    it at the end.
    """
    plan = make_plan(program, run_dir, options.grace, options.setup)
    killing = next((spec for spec in plan.nodes if spec.on_hang != "report"), None)
    if killing is not None and options.hang_after is None:
        raise ValueError(f"group {killing.label!r} has on_hang={killing.on_hang!r}, which needs hang_after, got None")
    if mode != "multi_host":
        check_channels_of_one_host(plan.edges)
    invocation = current_invocation()
    sink_run = SinkRun(
        plan.folder,
        program.name,
        invocation.argv,
        invocation.program_flags,
        graph=lambda: GraphView.of(program, mode).to_dict(),
    )
    if options.otel or options.trace:
        check_is_not_traced("otel=True" if options.otel else "trace=True")
    exporter = OpenTelemetryExporter(program.name) if options.otel else None
    with contextlib.ExitStack() as undoing:
        sinks, scraped = list(options.metrics_sinks), None
        if options.metrics_port is not None:
            scraped = OpenMetricsServer(options.metrics_port)
            undoing.callback(scraped.close)
            sinks.append(scraped.latest)
        metrics = MetricsLog(plan.folder.metrics, sinks, sink_run)
        host, coordinator = MODES[mode](plan, metrics, host_options)
        is_listed = mode != "thread" if options.listed is None else options.listed
        keeps_records = is_listed or options.run_dir is not None
        hangs, tracer = HangWatch(coordinator, host, options.hang_after), Tracer(coordinator, host)
        control = ControlPoint(program, mode, coordinator, host, hangs, tracer, is_listed) if keeps_records else None
        run = Run(program, coordinator, host, metrics, hangs, tracer, scraped, control, keeps_records)
        if scraped is not None:
            scraped.show(coordinator, hangs)
        if exporter is not None:
            tracer.export_to(exporter)
        if options.trace:
            tracer.begin(plan.folder.trace)
        print_reports()
        run.start()
        undoing.pop_all()
        return run


@contextlib.contextmanager
def _naming_shortage(program: Program) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError) as error:
        if not is_limit_reached(error):
            raise
        raise LaunchError(
            f"program {program.name!r} could not be launched, and is down: {describe_error(error)}"
        ) from error


def check_program(found: Any, wanted: str) -> Program:
    """
    Raises:
        TypeError: it is something else than `wanted`.
    """
    if not isinstance(found, Program):
        raise TypeError(f"{wanted}, not {found!r} of type {type(found).__name__}")
    return found
