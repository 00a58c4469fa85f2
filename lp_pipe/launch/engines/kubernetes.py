"""The engine `kubernetes`: agents in the equal pods of a JobSet or of an indexed Job."""

import ipaddress
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from lp_pipe.errors import LaunchError
from lp_pipe.launch.engines.base import Engine, HostOffer, Invitation, StartedAgent
from lp_pipe.launch.engines.host_list import read_hosts
from lp_pipe.launch.engines.kubernetes_manifest import HOST, KINDS, NONROOT, SECRET_FILE, Object, PodGroup, read_user

if TYPE_CHECKING:
    from lp_pipe.launch.engines.kubernetes_pods import Pods

_MISSING = "engine 'kubernetes' needs the official client: pip install 'lp_pipe[kubernetes]'"
_NAME_CHARS = 30  # of the run's name; with the endings of lp_pipe, Jobs and pods at most 63
_JOIN_PATIENCE = ["--patience", "30"]  # seconds: a cluster's network may take some to route to a new pod


class KubernetesEngine(Engine):
    """Creates one pod for each host.

    hosts: how many pods, and what each may use: "4:gpus=8:cpus=32:memory_gib=256". Their names are host-0, host-1, ...
    image: must have `python` and lp_pipe in the launcher's versions.
    namespace: default: the kubeconfig's, or that of the launcher's own pod.
    kind: "jobset" (default), or "job", which every cluster has.
    kubeconfig: a file, in place of the one that `kubectl` would take.
    run_as_user: the user and group number that the pods run as. 0 is root, for images that need it; a namespace that
        enforces the Pod Security Standard `restricted` refuses it.

    The secret is in a Secret, which is deleted with the run. docs/multi_host.md lists the rights that the launcher
    needs.
    """

    OPTIONS: ClassVar[Mapping[str, str]] = {
        "image": "must have Python and lp_pipe in the launcher's versions",
        "namespace": "default: the kubeconfig's, or the launcher's own",
        "kind": "jobset (default) or job",
        "kubeconfig": "file, in place of the one that kubectl would take",
        "run_as_user": f"user number that the pods run as (default: {NONROOT}); 0: root",
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
            raise ValueError(
                "engine 'kubernetes': image is empty: name one that has Python and lp_pipe in the launcher's versions"
            )
        if kind not in KINDS:
            raise ValueError(f"engine 'kubernetes': kind must be {' or '.join(KINDS)}, got {kind!r}")
        self._count, self._limits = _read_count(hosts)
        self._user = read_user(run_as_user)
        self._image, self._namespace, self._kind, self._kubeconfig = image, namespace, kind, kubeconfig
        self._pods: Pods | None = None

    def hosts(self) -> Sequence[HostOffer]:
        limits = self._limits
        # Without a limit for GPUs the offer is 0, since a pod that requested none may still see those of others.
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
        log_paths = {offer.name: invitation.log_path(offer.name) for offer in self.hosts()}
        self._pods = Pods(cluster, objects, log_paths)
        return self._pods.hosts

    def preview(self, invitation: Invitation) -> str:
        """Return the manifest as YAML."""
        try:
            from lp_pipe.launch.engines.kubernetes_api import as_yaml  # needs an extra
        except ImportError as error:
            raise LaunchError(f"{_MISSING} ({error})") from error
        return as_yaml(self._objects(invitation, self._namespace or "default", "LEFT-OUT"))

    def close(self) -> None:
        if self._pods is not None:
            self._pods.close()

    def _objects(self, invitation: Invitation, namespace: str, secret: str) -> list[Object]:
        run = invitation.run_folder.path.name
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
    wrong = f"engine 'kubernetes': hosts must be a number of pods, such as --hosts=4 or --hosts=4:gpus=8, got {text!r}"
    if not text:
        raise ValueError(wrong)
    offers = read_hosts(text)
    if len(offers) != 1 or not offers[0].name.isdecimal() or int(offers[0].name) < 1:
        raise ValueError(wrong)
    return int(offers[0].name), offers[0]


def _label(text: str) -> str:
    """Return `text` reduced to characters of a label's value, and in lower case also of an object's name."""
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
                f"engine 'kubernetes': no pod can reach the launcher's loopback address {address}: launch in a pod "
                "of the cluster, or give an address of this host that the pods can reach (listen=, --listen=)"
            )
