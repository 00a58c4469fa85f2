"""Programs on a pretend cluster, through the official client; no real API server is to be had here."""

import getpass
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

import lp_pipe as lp
from lp_pipe.launch.engines import Invitation, KubernetesEngine, kubernetes_pods, make_engine
from lp_pipe.launch.hosts.network import addresses_for
from tests.launch.engines import pod_processes
from tests.launch.engines.kubernetes_cluster import PretendCluster, Refusal
from tests.waiting import until

WITHIN_S = 20.0


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[PretendCluster]:
    made = PretendCluster(tmp_path)
    yield made
    made.close()


def engine(cluster: PretendCluster, hosts: str = "2", **options: str) -> KubernetesEngine:
    return KubernetesEngine(hosts, **{"image": "train:1", "kubeconfig": cluster.kubeconfig, **options})


def invitation(folder: Path) -> Invitation:
    return Invitation(["10.0.0.5:29500"], b"very secret", str(folder / "Run 1" / "agents"))


def failing(cluster: PretendCluster, tmp_path: Path, **options: str) -> str:
    """Return the text of the launch's error, after which nothing is left."""
    failing = engine(cluster, **options)
    with pytest.raises(lp.LaunchError) as raised:
        failing.start(invitation(tmp_path))
    failing.close()
    return str(raised.value)


def test_the_documented_role_is_what_a_launcher_asks_for(cluster: PretendCluster, tmp_path: Path) -> None:
    page = Path(__file__).parents[3] / "docs" / "multi_host.md"
    (block,) = re.findall(r"```yaml\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    role = yaml.safe_load(block)
    kubernetes_validate.validate(role, "1.31", strict=True)
    allowed = {f"{verb} {what}" for rule in role["rules"] for what in rule["resources"] for verb in rule["verbs"]}
    for kind in ("job", "jobset"):
        running = engine(cluster, kind=kind)
        (pod, _) = running.start(invitation(tmp_path))
        cluster.set_status(0, "Running", {"running": {}})
        cluster.log(0, "hello")
        until(lambda pod=pod: pod.last_lines() == ["hello"])  # type: ignore[misc]
        running.close()
    assert set(cluster.asked) == allowed


@pytest.mark.parametrize(
    ("kind", "made"), [("jobset", ["secrets", "jobsets"]), ("job", ["secrets", "services", "jobs"])]
)
def test_objects_are_made_and_owned_and_all_gone_in_the_end(
    kind: str, made: list[str], cluster: PretendCluster, tmp_path: Path
) -> None:
    running = engine(cluster, kind=kind)
    pods = running.start(invitation(tmp_path))
    assert [what for what, _ in cluster.objects if what != "pods"] == made
    assert [pod.hosts for pod in pods] == [("host-0",), ("host-1",)]
    owner = next(one for (what, _), one in cluster.objects.items() if what == made[-1])
    owned = [one for (what, _), one in cluster.objects.items() if what in made[:-1]]
    assert all(one["metadata"]["ownerReferences"][0]["uid"] == owner["metadata"]["uid"] for one in owned)
    for pod in pods:
        pod.kill()
        assert pod.how_it_ended() is not None
    running.close()
    assert not cluster.objects


def test_pods_are_watched_and_their_logs_are_followed(cluster: PretendCluster, tmp_path: Path) -> None:
    running = engine(cluster)
    first, second = running.start(invitation(tmp_path))
    until(lambda: "is Pending" in first.last_lines()[0])
    scheduling = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes have it"}
    cluster.set_status(0, "Pending", conditions=[scheduling])
    until(lambda: first.last_lines()[0].endswith("is Pending: Unschedulable: 0/3 nodes have it"))
    for index in range(2):
        cluster.set_status(index, "Running", {"running": {}})
    cluster.log(0, "hello", "wörld")
    until(lambda: first.last_lines() == ["hello", "wörld"])
    assert first.how_it_ended() is None
    cluster.log(0, "bye")
    cluster.set_status(0, "Failed", {"terminated": {"exitCode": 3}})
    cluster.set_status(1, "Failed", {"terminated": {"exitCode": 137}})
    until(lambda: first.how_it_ended() == "exit status 3" and first.last_lines()[-1] == "bye")
    until(lambda: second.how_it_ended() == "killed by SIGKILL")
    running.close()
    assert (tmp_path / "Run 1" / "agents" / "host-0.log").read_text() == "hello\nwörld\nbye\n"


@pytest.mark.parametrize(
    ("phase", "container", "status", "said"),
    [
        ("Pending", {"waiting": {"reason": "ErrImagePull"}}, {}, None),
        (
            "Pending",
            {"waiting": {"reason": "ImagePullBackOff", "message": 'pulling image "train:1"'}},
            {},
            r'ImagePullBackOff: pulling image "train:1"; .*--image.*imagePullSecrets.*',
        ),
        (
            "Failed",
            None,
            {"reason": "Evicted", "message": "The node was low on resource: memory."},
            r"Evicted: The node was low on resource: memory\.; .*--hosts=2:memory_gib=32.*",
        ),
        (
            "Failed",
            {"terminated": {"exitCode": 137, "reason": "OOMKilled"}},
            {},
            r"OOMKilled; .*memory.*--hosts=2:memory_gib=32",
        ),
        (
            "Failed",
            {"terminated": {"exitCode": 137}},
            {"conditions": [{"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}]},
            "PreemptionByScheduler",
        ),
        ("Succeeded", {"terminated": {"exitCode": 0}}, {}, "exit status 0"),
    ],
)
def test_a_pod_that_ends_says_how_and_what_to_do(
    phase: str, container: Any, status: Any, said: str | None, cluster: PretendCluster, tmp_path: Path
) -> None:
    running = engine(cluster, hosts="1")
    (pod,) = running.start(invitation(tmp_path))
    cluster.set_status(0, phase, container, **status)
    if said is None:
        until(lambda: "ErrImagePull" in pod.last_lines()[0])
        assert pod.how_it_ended() is None
    else:
        until(lambda: re.fullmatch(said, str(pod.how_it_ended())) is not None)
    running.close()


def test_a_pod_that_somebody_deletes_has_ended(cluster: PretendCluster, tmp_path: Path) -> None:
    running = engine(cluster)
    pods = running.start(invitation(tmp_path))
    cluster.delete("pods", cluster.pod(1)["metadata"]["name"])
    until(lambda: "its pod was deleted" in str(pods[1].how_it_ended()))
    assert pods[0].how_it_ended() is None
    running.close()


def test_a_namespace_that_is_not_there(cluster: PretendCluster, tmp_path: Path) -> None:
    said = failing(cluster, tmp_path, namespace="nowhere")
    assert "`kubectl create namespace nowhere`" in said and "--namespace" in said


def test_a_cluster_without_jobsets(cluster: PretendCluster, tmp_path: Path) -> None:
    cluster.has_jobsets = False
    assert "use --kind=job" in failing(cluster, tmp_path)
    assert not cluster.objects


@pytest.mark.parametrize("what", ["create secrets", "create jobsets", "patch secrets", "list pods"])
def test_what_is_not_allowed_is_named_and_nothing_is_left(what: str, cluster: PretendCluster, tmp_path: Path) -> None:
    cluster.refuse[what] = Refusal(403, f'User "me" cannot {what}')
    said = failing(cluster, tmp_path)
    assert f'(User "me" cannot {what})' in said and "kubectl auth can-i" in said
    assert not cluster.objects


def test_what_somebody_else_has_made_is_left_alone(
    cluster: PretendCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("secrets.token_hex", lambda size: "0a1b2c")
    theirs = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "lp-run-1-0a1b2c", "namespace": "team"}}
    cluster.create("", "secrets", "team", theirs)
    assert "exists already" in failing(cluster, tmp_path)
    assert list(cluster.objects) == [("secrets", "lp-run-1-0a1b2c")]


def test_an_answer_that_has_no_reason_is_quoted(cluster: PretendCluster, tmp_path: Path) -> None:
    cluster.refuse["create secrets"] = Refusal(422, "Secret is invalid: because")
    assert "HTTP status 422: Secret is invalid: because" in failing(cluster, tmp_path)
    cluster.refuse["create secrets"] = Refusal(401, "Unauthorized")
    assert "(Unauthorized)" in failing(cluster, tmp_path)


def test_an_api_server_that_does_not_answer(tmp_path: Path) -> None:
    cluster = PretendCluster(tmp_path)
    cluster.stop_answering()
    said = failing(cluster, tmp_path)
    assert f"the API server {cluster.url} does not answer" in said and "refused" in said


@pytest.mark.parametrize("text", [None, "", "{", "[1]", "{apiVersion: v1, current-context: other}"])
def test_a_kubeconfig_that_is_none_is_named(text: str | None, cluster: PretendCluster, tmp_path: Path) -> None:
    file = tmp_path / "config"
    if text is not None:
        file.write_text(text)
    said = failing(cluster, tmp_path, kubeconfig=str(file))
    assert said.startswith(f"engine 'kubernetes': no cluster is known: {file}: ") and not cluster.asked


def test_what_cannot_be_deleted_is_named(
    cluster: PretendCluster, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = engine(cluster, kind="job")
    (pod, _) = running.start(invitation(tmp_path))
    cluster.refuse["delete jobs"] = Refusal(403, "not you")
    monkeypatch.setattr(kubernetes_pods, "_GONE_PATIENCE_S", 1000)
    pod.kill()
    running.close()
    (name,) = [name for what, name in cluster.objects if what != "pods"]
    assert f"Delete with kubectl what is left: Job {name}" in caplog.text


def test_a_cluster_that_has_gone_is_not_waited_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = PretendCluster(tmp_path)
    running = engine(cluster, kind="job")
    (pod, _) = running.start(invitation(tmp_path))
    (name,) = [name for what, name in cluster.objects if what == "jobs"]
    cluster.close()
    monkeypatch.setattr(kubernetes_pods, "_GONE_PATIENCE_S", 1000)
    pod.kill()
    running.close()
    assert f"Delete with kubectl what is left: Job {name}, Secret {name}, Service {name}" in caplog.text


@pytest.mark.parametrize(
    ("hosts", "options", "said"),
    [
        ("4", {}, "engine 'kubernetes': image"),
        ("4", {"image": "train", "kind": "deployment"}, "kind must be jobset or job, got 'deployment'"),
        ("", {"image": "train"}, "hosts must be .*got ''"),
        ("0", {"image": "train"}, "hosts must be .*got '0'"),
        ("h1,h2", {"image": "train"}, "hosts must be .*got 'h1,h2'"),
        ("1", {"image": "train", "run_as_user": "me"}, "run_as_user must be .*got 'me'"),
        ("1", {"image": "train", "run_as_user": "-1"}, "run_as_user must be .*got '-1'"),
        ("1", {"image": "train", "run_as_user": str(1 << 31)}, "from 0 \\(root\\) to 2147483647"),
    ],
)
def test_options_that_make_no_sense(hosts: str, options: dict[str, str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make_engine("kubernetes", hosts, options)


def test_without_the_client_the_error_names_the_extra(tmp_path: Path) -> None:
    script = """if True:
        import sys
        sys.modules["kubernetes"] = sys.modules["yaml"] = None
        from lp_pipe.launch.engines import Invitation, KubernetesEngine
        engine = KubernetesEngine("1", image="train")
        for act in (engine.start, engine.preview):
            try:
                act(Invitation(["10.0.0.5:1"], b"", sys.argv[1]))
            except Exception as error:
                print(error)
    """
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.count("pip install 'lp_pipe[kubernetes]'") == 2


class Echo:
    def pid(self) -> int:
        return os.getpid()

    def whoami(self) -> tuple[int, int, str, str]:
        return os.getuid(), os.getgid(), getpass.getuser(), os.path.expanduser("~")

    def source(self) -> str:
        return Path("word").read_text()

    def write(self) -> str:
        (lp.context().run_dir / "mine").write_text("hello")
        return str(lp.context().run_dir)


def program() -> lp.Program:
    found = lp.Program("in pods")
    with found.group("echo"):
        for _ in range(2):
            found.add_node(lp.CourierNode(Echo))
    return found


needs_address = pytest.mark.skipif(not addresses_for([]), reason="this host has no address but loopback")


@needs_address
def test_the_commands_of_the_pods_run_a_program(no_leaks: None, cluster: PretendCluster, tmp_path: Path) -> None:
    cluster.run_pods(2)
    with lp.launch(program(), "multi_host", engine=engine(cluster), run_dir=tmp_path / "run") as run:
        pids = {run.client("echo", index).pid() for index in range(2)}
        assert len(pids | {os.getpid()}) == 3
    assert not cluster.objects
    assert "the run has ended" in (tmp_path / "run" / "agents" / "host-1.log").read_text()


@pytest.fixture
def pods() -> Iterator[pod_processes.PodProcesses]:
    made = pod_processes.PodProcesses()
    yield made
    made.close()


@needs_address
@pytest.mark.skipif(bool(pod_processes.why_not()), reason=pod_processes.why_not() or "it can be done")
def test_a_pod_is_of_a_user_that_nobody_knows_and_that_has_a_home(
    no_leaks: None,
    pods: pod_processes.PodProcesses,
    cluster: PretendCluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "sources").mkdir()
    (tmp_path / "sources" / "word").write_text("hello")
    monkeypatch.chdir(tmp_path / "sources")
    cluster.run_pods(1, pods.start)
    as_one = engine(cluster, hosts="1", run_as_user="54321")
    with lp.launch(program(), "multi_host", engine=as_one, run_dir=pods.folder / "run", sync=".") as run:
        for index in range(2):
            user, group, name, home = run.client("echo", index).whoami()
            assert (user, group, name) == (54321, 54321, "lp_pipe")
            assert os.listdir(f"{home}/.cache/lp_pipe") == ["sync"]
            assert run.client("echo", index).source() == "hello"
            assert run.client("echo", index).write() != str(run.run_dir)  # it is there, but of the launcher's user
        assert "mine" not in os.listdir(run.run_dir)
    assert "the run has ended" in (run.run_dir / "agents" / "host-0.log").read_text()


@needs_address
def test_a_host_whose_pod_cannot_start_is_in_the_launch_error(no_leaks: None, cluster: PretendCluster) -> None:
    class Broken(KubernetesEngine):
        def start(self, invitation: Invitation) -> Any:
            found = super().start(invitation)
            cluster.set_status(1, "Pending", {"waiting": {"reason": "InvalidImageName", "message": "bad train::1"}})
            return found

    broken = Broken("2", image="train::1", kubeconfig=cluster.kubeconfig)
    with pytest.raises(lp.LaunchError, match=r"host-1: its agent ended \(InvalidImageName: bad train::1; check --im"):
        lp.launch(program(), "multi_host", engine=broken)
    assert not cluster.objects
