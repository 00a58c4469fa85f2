"""Agents in the pods of a Kubernetes cluster: a JobSet, or an indexed Job, of equal pods."""

import ipaddress
import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from lp_pipe.errors import LaunchError
from lp_pipe.launch.engines.base import Engine, HostOffer, Invitation, StartedAgent
from lp_pipe.launch.engines.host_list import read_hosts
from lp_pipe.launch.engines.kubernetes_manifest import HOST, KINDS, NONROOT, SECRET_FILE, Object, PodGroup, read_user

if TYPE_CHECKING:
    from lp_pipe.launch.engines.kubernetes_pods import Pods

_MISSING = "engine 'kubernetes' needs the official client: pip install 'lp_pipe[kubernetes]'"
_NAME_CHARS = 30  # with our endings, and those of Jobs and pods, 63 at most
_JOIN_PATIENCE = ["--patience", "30"]  # a cluster's network may need some seconds to know a new pod


class KubernetesEngine(Engine):
    """hosts: how many pods, with what each may use: "4:gpus=8:cpus=32:memory_gib=256". Their names: host-0, host-1, ...

    image: with Python of the launcher's version, as `python`, and lp_pipe. namespace: default: the kubeconfig's, or
    that of the launcher's own pod. kind: "jobset" (default), or "job", which every cluster has. kubeconfig: a file, in
    place of what `kubectl` would take. run_as_user: the number of whom the pods run as, and of their group; 0: root,
    for images that need it, which a namespace that enforces the Pod Security Standard `restricted` refuses.

    The secret is a Secret, which is deleted with the run. docs/multi_host.md says what rights the launcher needs.
    """

    OPTIONS: ClassVar[Mapping[str, str]] = {
        "image": "with Python and lp_pipe of the launcher's versions",
        "namespace": "default: the kubeconfig's, or the launcher's own",
        "kind": "jobset (default) or job",
        "kubeconfig": "in place of what kubectl would take",
        "run_as_user": f"whom the pods run as (default: {NONROOT}); 0: root",
    }

    def __init__(
        self,
        hosts: str = "",
        *,
        image: str = "",
        namespace: str = "",
        kind: str = "jobset",
        kubeconfig: str = "",
        run_as_user: str = str(NONROOT),
    ) -> None:
        if not image:
            raise ValueError("engine 'kubernetes' needs image: one with Python and lp_pipe of the launcher's versions")
        if kind not in KINDS:
            raise ValueError(f"engine 'kubernetes': kind={kind!r} is neither of {', '.join(KINDS)}")
        self._count, self._limits = _read_count(hosts)
        self._user = read_user(run_as_user)
        self._image, self._namespace, self._kind, self._kubeconfig = image, namespace, kind, kubeconfig
        self._pods: Pods | None = None

    def hosts(self) -> Sequence[HostOffer]:
        limits = self._limits
        # A pod that has asked for no GPU may see those of others, and must not use them.
        return [
            HostOffer(f"host-{number}", limits.cpus, limits.gpus or 0, limits.memory) for number in range(self._count)
        ]

    def start(self, invitation: Invitation) -> Sequence[StartedAgent]:
        _check_addresses(invitation.addresses)
        try:
            from lp_pipe.launch.engines.kubernetes_api import Cluster  # slow to import, and an extra
            from lp_pipe.launch.engines.kubernetes_pods import Pods
        except ImportError as error:
            raise LaunchError(f"{_MISSING} ({error})") from error
        cluster = Cluster(self._namespace, self._kubeconfig, connections=self._count + 4)
        objects = self._objects(invitation, cluster.namespace, invitation.secret.decode())
        names = [offer.name for offer in self.hosts()]
        self._pods = Pods(cluster, objects, names, Path(invitation.log_dir))
        return self._pods.hosts

    def preview(self, invitation: Invitation) -> str:
        """The manifest, as YAML."""
        try:
            from lp_pipe.launch.engines.kubernetes_api import as_yaml  # of an extra
        except ImportError as error:
            raise LaunchError(f"{_MISSING} ({error})") from error
        return as_yaml(self._objects(invitation, self._namespace or "default", "LEFT-OUT"))

    def close(self) -> None:
        if self._pods is not None:
            self._pods.close()

    def _objects(self, invitation: Invitation, namespace: str, secret: str) -> list[Object]:
        run = Path(invitation.log_dir).parent.name
        group = PodGroup(
            name=f"lp-{_label(run).lower()[:_NAME_CHARS]}-{secrets.token_hex(3)}",
            run=_label(run),
            namespace=namespace,
            image=self._image,
            count=self._count,
            limits=self._limits,
            arguments=[*invitation.arguments(HOST, SECRET_FILE), *_JOIN_PATIENCE],
            ports=sorted({int(address.rpartition(":")[2]) for address in invitation.addresses}),
            user=self._user,
        )
        return KINDS[self._kind](group, secret)


def _read_count(text: str) -> tuple[int, HostOffer]:
    wrong = f"engine 'kubernetes': hosts={text!r}: write how many pods, such as --hosts=4 or --hosts=4:gpus=8"
    if not text:
        raise ValueError(wrong)
    offers = read_hosts(text)
    if len(offers) != 1 or not offers[0].name.isdecimal() or int(offers[0].name) < 1:
        raise ValueError(wrong)
    return int(offers[0].name), offers[0]


def _label(text: str) -> str:
    """As near to `text` as a label's value can be, which also may be part of a name when it is in lower case."""
    return re.sub(r"[^A-Za-z0-9]+", "-", text)[:63].strip("-") or "run"


def _check_addresses(addresses: Sequence[str]) -> None:
    for address in addresses:
        name = address.rpartition(":")[0].strip("[]")
        try:
            is_loopback = ipaddress.ip_address(name).is_loopback
        except ValueError:
            is_loopback = name == "localhost"
        if is_loopback:
            raise LaunchError(
                f"no pod can reach the launcher at {address}: launch in a pod of the cluster, or say by which address "
                "of this host its pods reach it (listen=, --listen=)"
            )
