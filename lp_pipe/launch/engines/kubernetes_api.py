"""Access to one namespace of a cluster. The only file that imports the official Kubernetes client."""

import contextlib
import json
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import urllib3
import yaml
from kubernetes import client, config, watch

from lp_pipe.errors import LaunchError
from lp_pipe.launch.engines.kubernetes_manifest import Object

_RIGHTS = "the rights that a launcher needs are in docs/multi_host.md"


class NoAnswer(LaunchError):
    """The API server did not answer. It may have done what was asked, or not."""


class NotThere(LaunchError):
    """The object, its namespace or its kind does not exist (HTTP status 404)."""


def explained(what: str, namespace: str, status: int | None, body: str | bytes | None, reason: str | None) -> str:
    """Return the error message for an answer with an HTTP `status` other than 2xx."""
    said = _message(body) or reason or "no reason given"
    return f"engine 'kubernetes': cannot {what} in namespace {namespace!r}: {_advice(what, namespace, status, said)}"


def unreachable(what: str, server: str, error: BaseException) -> str:
    """Return the error message for a request without an answer."""
    why = str(error).rpartition("Caused by ")[2]
    return (
        f"engine 'kubernetes': cannot {what}: the API server {server} does not answer: {why}. "
        "Check that `kubectl get pods` works on this host with the same kubeconfig"
    )


def _advice(what: str, namespace: str, status: int | None, said: str) -> str:
    if status == 401:
        return f"the API server does not accept this login ({said}); log in again, and check with `kubectl auth whoami`"
    if status == 403:
        return f"this account lacks the right ({said}); {_RIGHTS}, and `kubectl auth can-i` shows which are missing"
    if status == 404 and re.search(r"namespaces? .* not found", said):
        return f"the namespace does not exist; `kubectl create namespace {namespace}`, or give another with --namespace"
    if status == 404 and "JobSet" in what:
        return "JobSets are not installed in this cluster; install them (jobset.sigs.k8s.io), or use --kind=job"
    if status == 409:
        return f"an object of this name exists already ({said}) and was not changed; launch again to get another name"
    return f"HTTP status {status}: {said}"


def _message(body: str | bytes | None) -> str:
    text = body.decode(errors="replace") if isinstance(body, bytes) else body or ""
    try:
        found = json.loads(text)
    except ValueError:
        return text.strip()[:500]
    return str(found.get("message", "")) if isinstance(found, dict) else ""


_ANSWER_PATIENCE_S = 10
_WATCH_S = 60  # the watch is then renewed, so that a silently cut connection is noticed
_JOBSET = {"group": "jobset.x-k8s.io", "version": "v1alpha2", "plural": "jobsets"}


class Cluster:
    """A client of one namespace. Its methods may be called in any thread, and raise LaunchError for any API error.

    namespace: "" for that of the kubeconfig, or of the pod in which this process runs. connections: how many at once.

    Raises (constructor):
        LaunchError: no kubeconfig and no service account says where the API server is.
    """

    def __init__(self, namespace: str = "", kubeconfig: str = "", connections: int = 8) -> None:
        settings, found = _settings(kubeconfig)
        settings.connection_pool_maxsize = connections
        settings.retries = 1  # the default of 3 would triple the timeout
        self.namespace = namespace or found
        self._server = settings.host
        self._api = client.ApiClient(settings)
        self._core, self._batch = client.CoreV1Api(self._api), client.BatchV1Api(self._api)
        self._custom = client.CustomObjectsApi(self._api)
        self._watches: set[watch.Watch] = set()
        self._lock = threading.Lock()
        self._is_closed = False

    def create(self, body: Object) -> str:
        """Create the object and return its uid."""
        kind = body["kind"]
        calls: dict[str, Callable[..., Any]] = {
            "Secret": self._core.create_namespaced_secret,
            "Service": self._core.create_namespaced_service,
            "Job": self._batch.create_namespaced_job,
            "JobSet": partial(self._custom.create_namespaced_custom_object, **_JOBSET),
        }
        made = self._ask(f"create {kind} {body['metadata']['name']}", calls[kind], body=body)
        return str(made["metadata"]["uid"])

    def change(self, body: Object, change: Object) -> None:
        """Merge `change` into a Secret or Service."""
        kind, name = body["kind"], body["metadata"]["name"]
        calls = {"Secret": self._core.patch_namespaced_secret, "Service": self._core.patch_namespaced_service}
        self._ask(f"patch {kind} {name}", calls[kind], name=name, body=change)

    def delete(self, body: Object) -> None:
        """Delete the object and all that it owns. No error if it does not exist."""
        kind, name = body["kind"], body["metadata"]["name"]
        calls: dict[str, Callable[..., Any]] = {
            "Secret": self._core.delete_namespaced_secret,
            "Service": self._core.delete_namespaced_service,
            "Job": self._batch.delete_namespaced_job,
            "JobSet": partial(self._custom.delete_namespaced_custom_object, **_JOBSET),
        }
        with contextlib.suppress(NotThere):
            self._ask(f"delete {kind} {name}", calls[kind], name=name, propagation_policy="Background")

    def pods(self, selector: str) -> tuple[list[Object], str]:
        """Return the pods that match, and the resource version from which to watch for changes."""
        found = self._ask("list pods", self._core.list_namespaced_pod, label_selector=selector)
        return found["items"], found["metadata"]["resourceVersion"]

    def changes(self, selector: str, version: str) -> Iterator[tuple[str, Object]]:
        """Yield (ADDED, MODIFIED or DELETED, the pod). Ends after a minute, or at `close`."""
        events = self._stream(
            self._core.list_namespaced_pod,
            namespace=self.namespace,
            label_selector=selector,
            resource_version=version,
            timeout_seconds=_WATCH_S,
            _request_timeout=(_ANSWER_PATIENCE_S, _WATCH_S + _ANSWER_PATIENCE_S),
        )
        for event in events:
            if event and event["type"] in ("ADDED", "MODIFIED", "DELETED"):
                yield event["type"], event["raw_object"]

    def log_lines(self, pod: str, container: str) -> Iterator[str]:
        """Yield the container's log from its first line on, until the container ends, or until `close`."""
        return self._stream(self._core.read_namespaced_pod_log, name=pod, namespace=self.namespace, container=container)

    def close(self) -> None:
        """End all watches and log readers, and close the connections."""
        with self._lock:
            self._is_closed = True
            watches = list(self._watches)
        for one in watches:
            one.stop()
        self._api.rest_client.pool_manager.clear()

    def _stream(self, function: Callable[..., Any], **arguments: Any) -> Iterator[Any]:
        one = watch.Watch("object")  # plain objects: the client's models reject fields of newer servers
        with self._lock:
            if self._is_closed:
                return
            self._watches.add(one)
        try:
            with self._explained(f"watch {function.__name__.rpartition('namespaced_')[2]}"):
                yield from one.stream(function, **arguments)
        finally:
            with self._lock:
                self._watches.discard(one)

    def _ask(self, what: str, call: Callable[..., Any], **arguments: Any) -> Object:
        with self._explained(what):
            response = call(
                namespace=self.namespace, **arguments, _request_timeout=_ANSWER_PATIENCE_S, _preload_content=False
            )
            if not 200 <= response.status < 300:
                raise self._refused(what, response.status, response.data, response.reason)
            found: Object = json.loads(response.data)
            return found

    @contextlib.contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        try:
            yield
        except client.ApiException as error:
            raise self._refused(what, error.status, error.body, error.reason) from error
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise NoAnswer(unreachable(what, self._server, error)) from error

    def _refused(self, what: str, status: int | None, body: str | bytes | None, reason: str | None) -> LaunchError:
        kind = NotThere if status == 404 else LaunchError
        return kind(explained(what, self.namespace, status, body, reason))


def _settings(kubeconfig: str) -> tuple[Any, str]:
    """Return the client's configuration and the namespace that goes with it."""
    settings = client.Configuration()
    try:
        if kubeconfig or not _is_in_cluster():
            config.load_kube_config(kubeconfig or None, client_configuration=settings)
            _, current = config.list_kube_config_contexts(kubeconfig or None)
            return settings, current["context"].get("namespace") or "default"
        config.load_incluster_config(client_configuration=settings)
        with open("/var/run/secrets/kubernetes.io/serviceaccount/namespace", encoding="utf-8") as file:
            return settings, file.read().strip()
    except (config.ConfigException, yaml.YAMLError, OSError, LookupError, TypeError, ValueError) as error:
        which = f"{kubeconfig}: " if kubeconfig else ""
        raise LaunchError(
            f"engine 'kubernetes': no cluster is known: {which}{error}; give a kubeconfig that `kubectl` accepts "
            "(KUBECONFIG, --kubeconfig=FILE), or a service account to the launcher's pod"
        ) from error


def _is_in_cluster() -> bool:
    return bool(os.environ.get("KUBERNETES_SERVICE_HOST")) and not os.environ.get("KUBECONFIG")


def as_yaml(objects: Sequence[Object]) -> str:
    """Return the objects as YAML documents for `kubectl apply -f -`."""
    return str(yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, width=120))


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]  # see pyproject.toml
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> Any:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)
