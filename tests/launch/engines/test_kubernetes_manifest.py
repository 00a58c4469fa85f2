"""Manifests: as a file for people to read, and by the schemas of Kubernetes and of JobSets."""

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from lp_pipe.launch.engines import Invitation
from lp_pipe.launch.engines.base import HostOffer
from lp_pipe.launch.engines.kubernetes import KubernetesEngine
from lp_pipe.launch.engines.kubernetes_api import as_yaml
from lp_pipe.launch.engines.kubernetes_manifest import HOST, KINDS, SECRET_FILE, Object, PodGroup

DATA = Path(__file__).parents[2] / "data"
VERSION = "1.31"


def group(**changes: Any) -> PodGroup:
    invitation = Invitation(["10.0.0.5:29500", "[fd00::5]:29500"], b"secret", "runs/Char-GPT/agents")
    usual: dict[str, Any] = {
        "name": "lp-char-gpt-0a1b2c",
        "run": "Char-GPT",
        "namespace": "team",
        "image": "registry.example/train:1",
        "count": 4,
        "limits": HostOffer("4", cpus=16, gpus=8, memory=64 << 30),
        "arguments": invitation.arguments(HOST, SECRET_FILE),
        "ports": [29500],
    }
    return PodGroup(**{**usual, **changes})


def job_of(objects: list[Object]) -> Object:
    spec = objects[-1]["spec"]
    if "replicatedJobs" in spec:
        spec = spec["replicatedJobs"][0]["template"]["spec"]
    found: Object = spec
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_manifest_reads_like_this(kind: str) -> None:
    written = as_yaml(KINDS[kind](group(), "LEFT-OUT"))
    assert written == (DATA / f"kubernetes_{kind}.yaml").read_text()
    assert list(yaml.safe_load_all(written)) == KINDS[kind](group(), "LEFT-OUT")


@pytest.mark.parametrize("limits", [HostOffer("4"), HostOffer("4", gpus=1), HostOffer("4", 16, 8, 64 << 30)])
@pytest.mark.parametrize("kind", KINDS)
def test_kubernetes_knows_every_field(kind: str, limits: HostOffer) -> None:
    objects = KINDS[kind](group(limits=limits), "secret")
    for one in objects:
        if one["kind"] != "JobSet":
            kubernetes_validate.validate(one, VERSION, strict=True)
    as_job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "one"}, "spec": job_of(objects)}
    kubernetes_validate.validate(as_job, VERSION, strict=True)


def test_the_validation_would_find_a_wrong_field() -> None:
    (_, _, job) = KINDS["job"](group(), "secret")
    job["spec"]["template"]["spec"]["restartPolice"] = "Never"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, VERSION, strict=True)


def test_jobsets_know_every_field() -> None:
    found = json.loads((DATA / "jobset-crd.json").read_text())
    validator = jsonschema.Draft7Validator(without_other_fields(found["schema"]))
    (_, jobset) = KINDS["jobset"](group(), "secret")
    assert (jobset["apiVersion"], jobset["kind"]) == (found["apiVersion"], found["kind"])
    validator.validate(jobset)
    jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["restartPolice"] = "Never"
    with pytest.raises(jsonschema.ValidationError, match="restartPolice"):
        validator.validate(jobset)


def without_other_fields(schema: Any) -> Any:
    """Make the schema as strict as an API server that refuses unknown fields."""
    if isinstance(schema, list):
        return [without_other_fields(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: without_other_fields(value) for key, value in schema.items()}
    is_closed = schema.get("type") == "object" and "properties" in schema and "additionalProperties" not in schema
    return {**found, "additionalProperties": False} if is_closed else found


@pytest.mark.parametrize(("user", "mode"), [(65532, 0o440), (1000, 0o440), (0, 0o400)])
@pytest.mark.parametrize("kind", KINDS)
def test_the_secret_is_a_file_that_only_the_pods_user_reads_and_nowhere_else(kind: str, user: int, mode: int) -> None:
    objects = KINDS[kind](group(user=user), "very secret")
    assert [one["kind"] for one in objects if "very secret" in json.dumps(one)] == ["Secret"]
    pod = job_of(objects)["template"]["spec"]
    (volume,) = [one for one in pod["volumes"] if "secret" in one]
    assert volume["secret"]["defaultMode"] == mode
    # It makes the files readable for that group, so it is there only where the user needs that.
    assert pod["securityContext"].get("fsGroup", 0) == user
    (container,) = pod["containers"]
    assert container["args"][-1] == SECRET_FILE
    assert {"name": volume["name"], "mountPath": "/run/lp_pipe", "readOnly": True} in container["volumeMounts"]


@pytest.mark.parametrize("run", ["x" * 300, "Größe 1/2", "...", "-a-", "2026-run"])
@pytest.mark.parametrize("kind", KINDS)
def test_names_are_names_of_pods_too_whatever_the_run_is_called(kind: str, run: str) -> None:
    engine = KubernetesEngine("1000", image="train", kind=kind)
    invitation = Invitation(["10.0.0.5:29500"], b"secret", f"{run.replace('/', '_')}/agents")
    text = engine.preview(invitation)
    for one in yaml.safe_load_all(text):
        name, label = one["metadata"]["name"], one["metadata"]["labels"]["lp-pipe/run"]
        assert name.isascii() and name[0].isalpha() and name[-1].isalnum() and name == name.lower()
        assert len(f"{name}-host-0-1000-abcde") <= 63 and len(label) <= 63
        assert label.isascii() and label[0].isalnum() and label[-1].isalnum()
    assert "LEFT-OUT" in text


def test_an_agent_is_alive_while_it_is_connected_to_the_launcher() -> None:
    with socket.create_server(("127.0.0.1", 0)) as launcher:
        port = launcher.getsockname()[1]
        pod = job_of(KINDS["job"](group(ports=[1, port]), ""))["template"]["spec"]
        probe = pod["containers"][0]["livenessProbe"]["exec"]["command"]
        assert run(probe) == (1, "no connection to the launcher\n")
        with socket.create_connection(launcher.getsockname()):
            connection, _ = launcher.accept()
            assert run(probe) == (0, "")
            connection.close()  # an agent that hangs does not notice
            assert run(probe)[0] == 1


def run(command: list[str]) -> tuple[int, str]:
    done = subprocess.run([sys.executable, *command[1:]], capture_output=True, text=True, timeout=20, check=False)
    return done.returncode, done.stderr
