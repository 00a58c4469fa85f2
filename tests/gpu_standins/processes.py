"""Processes with one stand-in GPU each, forked from a server that has imported torch once."""

import ctypes
import multiprocessing
import os
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from lp_pipe.channels import ChannelHub, Receiver, Sender, open_sender
from lp_pipe.errors import Unavailable

PATIENCE_S = 20.0
DEVICE = torch.device("cuda:0")
_context: Any = multiprocessing.get_context("forkserver")


class FakeStage:
    """What a scenario gets in its process: a hub, channels to other stages, and words with the test."""

    def __init__(self, name: str, directory: str, kind: str, words: "Connection[Any, Any]") -> None:
        self.name = name
        self.directory = directory
        self.kind = kind
        self._words = words
        self._hub = ChannelHub(f"unix:{directory}/{name}", name)
        self.senders: list[Sender] = []

    def receiver(self, channel: str, credits: int = 4) -> Receiver:
        return self._hub.receiver(channel, credits, device=DEVICE)

    def sender(self, channel: str, to: str) -> Sender:
        give_up_at = time.monotonic() + PATIENCE_S
        while True:
            try:
                endpoint = f"unix:{self.directory}/{to}"
                made = open_sender(endpoint, channel, kind=self.kind, name=self.name, peer=to, device=DEVICE)
            except Unavailable:  # its process is still being forked
                if time.monotonic() > give_up_at:
                    raise
                time.sleep(0.005)
            else:
                self.senders.append(made)
                return made

    def say(self, word: Any) -> None:
        self._words.send(("word", word))

    def hear(self) -> Any:
        return self._words.recv()

    def close(self) -> None:
        for sender in self.senders:
            sender.close("done")
        self._hub.close("done")


Scenario = Callable[[FakeStage], Any]


class FakeProcess:
    """A process that runs a scenario."""

    def __init__(self, scenario: Scenario, *settings: Any, env: dict[str, str]) -> None:
        self._words, theirs = _context.Pipe()
        self._process = _context.Process(target=_run, args=(scenario, settings, env, theirs), daemon=True)
        self._process.start()
        theirs.close()

    def say(self, word: Any) -> None:
        self._words.send(word)

    def hear(self) -> Any:
        kind, word = self._next()
        assert kind == "word", word
        return word

    def result(self) -> Any:
        """Return the scenario's result; words that were not heard are dropped."""
        while True:
            kind, value = self._next()
            assert kind != "error", value
            if kind == "result":
                return value

    def kill(self) -> None:
        self._process.kill()
        self._process.join(PATIENCE_S)

    def _next(self) -> tuple[str, Any]:
        assert self._words.poll(PATIENCE_S), "the process said nothing: it hangs"
        found: tuple[str, Any] = self._words.recv()
        return found


def _run(
    scenario: Scenario, settings: tuple[str, str, str, str, str], env: dict[str, str], words: "Connection[Any, Any]"
) -> None:
    name, gpu, directory, kind, library = settings
    # Not in /dev/shm: what a killed process leaves there is a leak to the tests that run beside this one.
    os.environ.update(env, FAKE_NCCL_FOLDER=directory)
    torch.set_num_threads(1)
    try:
        from tests.gpu_standins import fake_gpu

        fake_gpu.install(gpu, library, directory)
        stage = FakeStage(name, directory, kind, words)
        words.send(("result", scenario(stage)))
        assert not ctypes.CDLL(library).fake_races(), "two threads were in one communicator"
    except BaseException:
        words.send(("error", traceback.format_exc()))
    words.close()
    os._exit(0)


def threads_named(*starts: str) -> list[str]:
    """Return the names of this process's threads that begin like this, after they have had time to end."""
    give_up_at = time.monotonic() + 2
    while True:
        found = [thread.name for thread in threading.enumerate() if thread.name.startswith(starts)]
        if not found or time.monotonic() > give_up_at:
            return found
        time.sleep(0.01)


def preload() -> None:
    _context.set_forkserver_preload(["tests.gpu_standins.scenarios"])


def stop_server() -> None:
    multiprocessing.forkserver._forkserver._stop()  # type: ignore[attr-defined]  # there is no public way
