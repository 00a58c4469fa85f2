"""A pretend cluster: an API server over http that makes, shows, logs and deletes pods as the real one is documented to.

Its kubelet runs nothing, unless it is given a pod to run: then the pod's command is a process of this host.
"""

import contextlib
import itertools
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

Object = dict[str, Any]
Start = Callable[[Object, bytes, int], "subprocess.Popen[str]"]

INDEX = "batch.kubernetes.io/job-completion-index"
_PATH = re.compile(
    r"/(?:api/v1|apis/(?P<group>[^/]+/[^/]+))/namespaces/(?P<ns>[^/]+)/(?P<what>[a-z]+)(?:/(?P<name>.+))?"
)
_WAIT_S = 20.0


class Refusal(Exception):
    def __init__(self, status: int, message: str | None) -> None:
        self.status, self.message = status, message


class PretendCluster:
    """kubeconfig: of it. refuse: what to answer to "VERB what", as roles call them, instead of doing it.

    objects: by (what, name). asked: every "VERB what" so far.
    """

    def __init__(self, folder: Path, has_jobsets: bool = True) -> None:
        self.objects: dict[tuple[str, str], Object] = {}
        self.refuse: dict[str, Refusal] = {}
        self.asked: list[str] = []
        self.has_jobsets = has_jobsets
        self._logs: dict[str, list[str]] = {}
        self._events: list[tuple[int, str, Object]] = []
        self._changed = threading.Condition()
        self._numbers = itertools.count(1)
        self._is_over = False
        self._watches_ended = 0
        self._is_watched = False
        self._kubelets: list[threading.Thread] = []
        self._processes: list[subprocess.Popen[str]] = []
        self._folder = folder
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"cluster": self}))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), name="pretend API server")
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self.kubeconfig = self._write_kubeconfig(folder / "kubeconfig")

    def close(self) -> None:
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        for process in self._processes:
            process.kill()
        for kubelet in self._kubelets:
            kubelet.join()
        self.stop_answering()

    def stop_answering(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def pod(self, index: int) -> Object:
        with self._changed:
            assert self._changed.wait_for(lambda: self._pods().get(index) is not None, _WAIT_S), "there is no such pod"
            return self._pods()[index]

    def set_status(self, index: int, phase: str, container: Object | None = None, **status: Any) -> None:
        """Set what a kubelet would write: the pod's phase, the state of its container, and more."""
        pod = self.pod(index)
        states = [{"name": "sidecar", "state": {"running": {}}}, {"name": "agent", "state": container or {}}]
        with self._changed:
            changed = {**pod, "status": {"phase": phase, "containerStatuses": states, **status}}
            self._put("MODIFIED", "pods", changed)

    def end_watches(self) -> None:
        """End all watches, as a real server does now and then."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._is_watched, _WAIT_S), "nobody watches"
            self._is_watched = False
            self._watches_ended += 1
            self._changed.notify_all()

    def log(self, index: int, *lines: str) -> None:
        name = self.pod(index)["metadata"]["name"]
        with self._changed:
            self._logs[name] += lines
            self._changed.notify_all()

    def run_pods(self, count: int, start: Start | None = None) -> None:
        """Have a kubelet for each, which runs it by `start`: the process prints its log and ends with its status."""
        self._start = start or self._start_process
        for index in range(count):
            self._kubelets.append(threading.Thread(target=self._run_pod, args=(index,), name=f"kubelet {index}"))
            self._kubelets[-1].start()

    # Of the API: called in the server's threads.

    def create(self, group: str, what: str, namespace: str, body: Object) -> Object:
        if what == "jobsets" and not self.has_jobsets:
            raise Refusal(404, None)
        if namespace != "team":
            raise Refusal(404, f'namespaces "{namespace}" not found')
        key = (what, body["metadata"]["name"])
        with self._changed:
            if key in self.objects:
                raise Refusal(409, f'{what} "{key[1]}" already exists')
            assert body["metadata"]["namespace"] == namespace and body["apiVersion"] == (group or "v1")
            made = {**body, "metadata": {**body["metadata"], "uid": f"uid-{next(self._numbers)}"}}
            self.objects[key] = made
            if what in ("jobs", "jobsets"):
                self._make_pods(made)
        return made

    def change(self, what: str, name: str, change: Object) -> Object:
        with self._changed:
            found = self.objects[what, name]
            self.objects[what, name] = {**found, "metadata": {**found["metadata"], **change["metadata"]}}
            return self.objects[what, name]

    def delete(self, what: str, name: str) -> Object:
        with self._changed:
            if (what, name) not in self.objects:
                raise Refusal(404, f'{what} "{name}" not found')
            gone = self.objects.pop((what, name))
            for (kind, child), one in list(self.objects.items()):
                owners = one["metadata"].get("ownerReferences", [])
                if any(owner["uid"] == gone["metadata"]["uid"] for owner in owners):
                    self.delete(kind, child)
            if what == "pods":
                self._event("DELETED", gone)
        return {"kind": "Status", "apiVersion": "v1", "status": "Success"}

    def list_pods(self, selector: str) -> Object:
        with self._changed:
            items = [one for one in self._pods().values() if _matches(one, selector)]
            version = str(self._events[-1][0] if self._events else 0)
            return {"kind": "PodList", "apiVersion": "v1", "metadata": {"resourceVersion": version}, "items": items}

    def events(self, selector: str, since: int) -> Iterator[Object]:
        with self._changed:
            position, ended_before, self._is_watched = 0, self._watches_ended, True
            self._changed.notify_all()
        while not self._is_over and self._watches_ended == ended_before:
            with self._changed:
                while position == len(self._events) and not self._is_over and self._watches_ended == ended_before:
                    self._changed.wait(_WAIT_S)
                new, position = self._events[position:], len(self._events)
            for version, kind, pod in new:
                if version > since and _matches(pod, selector):
                    yield {"type": kind, "object": pod}

    def log_of(self, name: str) -> Iterator[str]:
        position = 0
        while not self._is_over:
            with self._changed:
                while position == len(self._logs[name]) and not self._has_ended(name) and not self._is_over:
                    self._changed.wait(_WAIT_S)
                new, position = self._logs[name][position:], len(self._logs[name])
                has_ended = self._has_ended(name)
            yield from new
            if has_ended:
                return

    # With the lock held.

    def _make_pods(self, owner: Object) -> None:
        job = (
            owner["spec"]["replicatedJobs"][0]["template"]["spec"]
            if "replicatedJobs" in owner["spec"]
            else owner["spec"]
        )
        for index in range(job["completions"]):
            template = job["template"]
            metadata = {
                **template["metadata"],
                "name": f"{owner['metadata']['name']}-{index}-x",
                "namespace": owner["metadata"]["namespace"],
                "annotations": {INDEX: str(index)},
                "uid": f"uid-{next(self._numbers)}",
                "ownerReferences": [
                    {"apiVersion": "v1", "kind": "Job", "name": "x", "uid": owner["metadata"]["uid"]},
                ],
            }
            self._logs[metadata["name"]] = []
            pod = {"kind": "Pod", "apiVersion": "v1", "metadata": metadata, "spec": template["spec"]}
            self._put("ADDED", "pods", {**pod, "status": {"phase": "Pending"}})

    def _put(self, kind: str, what: str, body: Object) -> None:
        self.objects[what, body["metadata"]["name"]] = body
        self._event(kind, body)

    def _event(self, kind: str, pod: Object) -> None:
        version = next(self._numbers)
        pod["metadata"] = {**pod["metadata"], "resourceVersion": str(version)}
        self._events.append((version, kind, pod))
        self._changed.notify_all()

    def _pods(self) -> dict[int, Object]:
        pods = [one for (what, _), one in self.objects.items() if what == "pods"]
        return {int(pod["metadata"]["annotations"][INDEX]): pod for pod in pods}

    def _has_ended(self, name: str) -> bool:
        pod = self.objects.get(("pods", name))
        return pod is None or pod["status"]["phase"] in ("Succeeded", "Failed")

    def _run_pod(self, index: int) -> None:
        with contextlib.suppress(AssertionError):  # closed before there was one
            pod = self.pod(index)
            (volume,) = [one["secret"] for one in pod["spec"]["volumes"] if "secret" in one]
            secret = self.objects["secrets", volume["secretName"]]["stringData"]["secret"]
            process = self._start(pod, secret.encode(), index)
            self._processes.append(process)
            self.set_status(index, "Running", {"running": {}})
            assert process.stdout is not None
            for line in process.stdout:
                self.log(index, line.rstrip())
            process.stdout.close()
            code = process.wait()
            self.set_status(index, "Failed" if code else "Succeeded", {"terminated": {"exitCode": code}})

    def _start_process(self, pod: Object, secret: bytes, index: int) -> "subprocess.Popen[str]":
        (container,) = pod["spec"]["containers"]
        path = self._folder / f"secret-{index}"
        path.write_bytes(secret)
        path.chmod(0o400)  # it runs as whom it is run by; as the pod's user: pod_processes.py
        replaced = {"$(JOB_COMPLETION_INDEX)": str(index), "/run/lp_pipe/secret": str(path)}
        command = [sys.executable, *(_replace(part, replaced) for part in container["args"])]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def _write_kubeconfig(self, path: Path) -> str:
        found = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "here",
            "clusters": [{"name": "pretend", "cluster": {"server": self.url}}],
            "users": [{"name": "me", "user": {"token": "a token"}}],
            "contexts": [{"name": "here", "context": {"cluster": "pretend", "user": "me", "namespace": "team"}}],
        }
        with open(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "w", encoding="utf-8") as file:
            json.dump(found, file)
        return str(path)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    cluster: PretendCluster

    def do_POST(self) -> None:
        self._answer("create")

    def do_PATCH(self) -> None:
        self._answer("patch")

    def do_DELETE(self) -> None:
        self._answer("delete")

    def do_GET(self) -> None:
        self._answer("get")

    def log_message(self, *ignored: Any) -> None:
        pass

    def _answer(self, verb: str) -> None:
        url = urlsplit(self.path)
        found = _PATH.fullmatch(url.path)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "null")
        try:
            if self.headers.get("Authorization") != "Bearer a token":
                raise Refusal(401, "Unauthorized")
            assert found is not None, url.path
            what, name = found["what"], found["name"] or ""
            asked = f"{_verb_of(verb, name, query)} {what}{'/log' if name.endswith('/log') else ''}"
            self.cluster.asked.append(asked)
            if asked in self.cluster.refuse:
                raise self.cluster.refuse[asked]
            if verb == "create":
                self._send(201, self.cluster.create(found["group"] or "", what, found["ns"], body))
            elif verb == "patch":
                assert "merge-patch" in self.headers["Content-Type"], self.headers["Content-Type"]
                self._send(200, self.cluster.change(what, name, body))
            elif verb == "delete":
                self._send(200, self.cluster.delete(what, name))
            elif name.endswith("/log"):
                self._stream(f"{line}\n" for line in self.cluster.log_of(name.removesuffix("/log")))
            elif query.get("watch", "").lower() == "true":
                events = self.cluster.events(query["labelSelector"], int(query["resourceVersion"]))
                self._stream(json.dumps(event) + "\n" for event in events)
            else:
                self._send(200, self.cluster.list_pods(query["labelSelector"]))
        except Refusal as refusal:
            self._refuse(refusal)

    def _refuse(self, refusal: Refusal) -> None:
        if refusal.message is None:
            return self._send(refusal.status, "404 page not found")
        status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": refusal.message}
        return self._send(refusal.status, {**status, "code": refusal.status})

    def _send(self, status: int, body: Object | str) -> None:
        data = (body if isinstance(body, str) else json.dumps(body)).encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/plain" if isinstance(body, str) else "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _stream(self, lines: Iterator[str]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/plain")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        with contextlib.suppress(OSError):  # the client has gone
            for line in lines:
                data = line.encode()
                self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
            self.wfile.write(b"0\r\n\r\n")


def _verb_of(verb: str, name: str, query: dict[str, str]) -> str:
    """Return the verb as roles name it."""
    if verb != "get" or name:
        return verb
    return "watch" if "watch" in query else "list"


def _matches(pod: Object, selector: str) -> bool:
    name, _, value = selector.partition("=")
    return bool(pod["metadata"]["labels"].get(name) == value)


def _replace(text: str, replaced: dict[str, str]) -> str:
    for old, new in replaced.items():
        text = text.replace(old, new)
    return text
