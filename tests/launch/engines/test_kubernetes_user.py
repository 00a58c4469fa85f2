"""Our pods in a namespace that enforces the Pod Security Standard `restricted`.

Source: kubernetes.io/docs/concepts/security/pod-security-standards, and the checks that enforce it, by whose names we
call them: kubernetes, staging/src/k8s.io/pod-security-admission/policy/check_*.go, to those of version 1.38. Those of
`baseline` for seccomp and capabilities are left out, because `restricted` has stricter ones. Where a later version
allows more, this table has what the first one does. Init and ephemeral containers, of which the checks speak too, our
pods have none of.
"""

from collections.abc import Callable
from typing import Any

import pytest

from lp_pipe.launch.engines.base import HostOffer
from lp_pipe.launch.engines.kubernetes_manifest import KINDS, Object
from tests.launch.engines.test_kubernetes_manifest import group, job_of

Check = Callable[[Object], bool]  # of a pod: {"metadata": ..., "spec": ...}

VOLUMES = {
    *("configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"),
}
SECCOMP = ("RuntimeDefault", "Localhost")
APPARMOR = (None, "RuntimeDefault", "Localhost")
SELINUX = (None, "", "container_t", "container_init_t", "container_kvm_t")
SYSCTLS = {
    *("kernel.shm_rmid_forced", "net.ipv4.ip_local_port_range", "net.ipv4.ip_unprivileged_port_start"),
    *("net.ipv4.tcp_syncookies", "net.ipv4.ping_group_range"),
}
PROBES = ("livenessProbe", "readinessProbe", "startupProbe")
ANNOTATION = "container.apparmor.security.beta.kubernetes.io/"

BASELINE: dict[str, Check] = {
    "hostNamespaces": lambda pod: not any(pod["spec"].get(key) for key in ("hostNetwork", "hostPID", "hostIPC")),
    "hostPathVolumes": lambda pod: not any("hostPath" in volume for volume in pod["spec"]["volumes"]),
    "privileged": lambda pod: not any(one.get("privileged") for one in of_containers(pod)),
    "hostPorts": lambda pod: not any(port.get("hostPort") for one in containers(pod) for port in one.get("ports", [])),
    "hostProbesAndHostLifecycle": lambda pod: (
        not any(
            handler.get("host")
            for one in containers(pod)
            for probe in [*(one.get(name) for name in PROBES), *one.get("lifecycle", {}).values()]
            for handler in [(probe or {}).get("httpGet", {}), (probe or {}).get("tcpSocket", {})]
        )
    ),
    "appArmorProfile": lambda pod: (
        all(one.get("appArmorProfile", {}).get("type") in APPARMOR for one in contexts(pod))
        and not any(name.startswith(ANNOTATION) for name in pod["metadata"].get("annotations", {}))
    ),
    "seLinuxOptions": lambda pod: all(
        options.get("type") in SELINUX and not options.get("user") and not options.get("role")
        for options in (one.get("seLinuxOptions", {}) for one in contexts(pod))
    ),
    "procMount": lambda pod: all(one.get("procMount", "Default") == "Default" for one in of_containers(pod)),
    "sysctls": lambda pod: {one["name"] for one in of_pod(pod).get("sysctls", [])} <= SYSCTLS,
    "ulimits": lambda pod: not any("ulimits" in one for one in of_containers(pod)),
    "windowsHostProcess": lambda pod: (
        not any(one.get("windowsOptions", {}).get("hostProcess") for one in contexts(pod))
    ),
}
RESTRICTED: dict[str, Check] = {
    "restrictedVolumes": lambda pod: all(VOLUMES & volume.keys() for volume in pod["spec"]["volumes"]),
    "allowPrivilegeEscalation": lambda pod: all(
        one.get("allowPrivilegeEscalation") is False for one in of_containers(pod)
    ),
    "runAsNonRoot": lambda pod: (
        all(of_pod(pod, one).get("runAsNonRoot") is True for one in of_containers(pod))
        and of_pod(pod).get("runAsNonRoot", True) is True
    ),
    "runAsUser": lambda pod: all(one.get("runAsUser") != 0 for one in contexts(pod)),
    "seccompProfile_restricted": lambda pod: all(
        of_pod(pod, one).get("seccompProfile", {}).get("type") in SECCOMP for one in of_containers(pod)
    ),
    "cgroupOptions_restricted": lambda pod: all(
        one.get("cgroupOptions", {}).get("mountMode", "ReadOnly") == "ReadOnly" for one in of_containers(pod)
    ),
    "capabilities_restricted": lambda pod: all(
        "ALL" in one.get("capabilities", {}).get("drop", [])
        and set(one["capabilities"].get("add", [])) <= {"NET_BIND_SERVICE"}
        for one in of_containers(pod)
    ),
}


def containers(pod: Object) -> list[Object]:
    found: list[Object] = pod["spec"]["containers"]
    return found


def of_containers(pod: Object) -> list[Object]:
    """Return the containers' security contexts."""
    return [one.get("securityContext", {}) for one in containers(pod)]


def of_pod(pod: Object, container: Object | None = None) -> Object:
    """Return the pod's security context together with that of a container, which comes first."""
    return {**pod["spec"].get("securityContext", {}), **(container or {})}


def contexts(pod: Object) -> list[Object]:
    return [of_pod(pod), *of_containers(pod)]


def pod_of(kind: str, **changes: Any) -> Object:
    found: Object = job_of(KINDS[kind](group(**changes), "secret"))["template"]
    return found


@pytest.mark.parametrize("limits", [HostOffer("4"), HostOffer("4", 16, 8, 64 << 30)])
@pytest.mark.parametrize("kind", KINDS)
def test_restricted_takes_our_pods(kind: str, limits: HostOffer) -> None:
    pod = pod_of(kind, limits=limits)
    assert not pod["spec"].keys() & {"initContainers", "ephemeralContainers"}
    assert [name for name, check in {**BASELINE, **RESTRICTED}.items() if not check(pod)] == []


@pytest.mark.parametrize("kind", KINDS)
def test_baseline_takes_those_of_root(kind: str) -> None:
    pod = pod_of(kind, user=0)
    assert [name for name, check in {**BASELINE, **RESTRICTED}.items() if not check(pod)] == [
        "runAsNonRoot",
        "runAsUser",
    ]
    assert pod["spec"]["containers"][0]["securityContext"]["runAsUser"] == 0
    assert "home" not in [volume["name"] for volume in pod["spec"]["volumes"]]


# By the name of a check, a change that it is there for.
REFUSED = {
    "hostNamespaces": {"hostPID": True},
    "hostPathVolumes": {"volumes": [{"name": "v", "hostPath": {"path": "/"}}]},
    "privileged": {"container": {"privileged": True}},
    "hostPorts": {"containers": [{"ports": [{"hostPort": 80}]}]},
    "hostProbesAndHostLifecycle": {"containers": [{"livenessProbe": {"httpGet": {"host": "elsewhere"}}}]},
    "appArmorProfile": {"pod": {"appArmorProfile": {"type": "Unconfined"}}},
    "seLinuxOptions": {"container": {"seLinuxOptions": {"type": "spc_t"}}},
    "procMount": {"container": {"procMount": "Unmasked"}},
    "sysctls": {"pod": {"sysctls": [{"name": "kernel.msgmax", "value": "1"}]}},
    "ulimits": {"container": {"ulimits": [{"name": "memlock"}]}},
    "windowsHostProcess": {"pod": {"windowsOptions": {"hostProcess": True}}},
    "restrictedVolumes": {"volumes": [{"name": "v", "nfs": {"server": "s", "path": "/"}}]},
    "allowPrivilegeEscalation": {"container": {"allowPrivilegeEscalation": True}},
    "runAsNonRoot": {"pod": {"runAsNonRoot": False}},
    "runAsUser": {"container": {"runAsUser": 0}},
    "seccompProfile_restricted": {"pod": {"seccompProfile": {"type": "Unconfined"}}},
    "cgroupOptions_restricted": {"container": {"cgroupOptions": {"mountMode": "Writable"}}},
    "capabilities_restricted": {"container": {"capabilities": {"drop": ["ALL"], "add": ["SYS_PTRACE"]}}},
}


@pytest.mark.parametrize("name", [*BASELINE, *RESTRICTED])
def test_each_check_would_find_a_pod_that_it_forbids(name: str) -> None:
    pod = pod_of("job")
    change = dict(REFUSED[name])
    of_pod_changed, of_container_changed = change.pop("pod", {}), change.pop("container", {})
    pod["spec"]["securityContext"].update(of_pod_changed)
    pod["spec"]["containers"][0]["securityContext"].update(of_container_changed)
    pod["spec"].update(change)
    assert not {**BASELINE, **RESTRICTED}[name](pod)
