"""lp_pipe/launch/plan/interpreter_state.py"""

import subprocess
import sys
from pathlib import Path

import pytest

WITHIN_S = 120

# Every setting of the table gets a value that is not the default.
SCRIPT = """
import asyncio, decimal, faulthandler, gc, locale, logging, multiprocessing, os, queue, socket, sys, threading, warnings

import numpy as np
import torch
import torch.distributions

import lp_pipe as lp
from lp_pipe.launch.plan.interpreter_state import SETTINGS

class Policy(asyncio.DefaultEventLoopPolicy):
    pass

def set_all():
    sys.setrecursionlimit(2345), sys.setswitchinterval(0.01), sys.set_int_max_str_digits(9000)
    sys.dont_write_bytecode = True
    threading.stack_size(1 << 20), gc.disable(), gc.set_threshold(500, 5, 5), os.umask(0o027), faulthandler.enable()
    socket.setdefaulttimeout(0.2), multiprocessing.set_start_method("spawn")
    multiprocessing.current_process().authkey = b"mine"
    asyncio.set_event_loop_policy(Policy()), locale.setlocale(locale.LC_ALL, "C.UTF-8")
    decimal.getcontext().prec = 50
    np.seterr(all="raise"), np.seterrcall(print), np.set_printoptions(precision=3, suppress=True)
    torch.set_default_dtype(torch.float64), torch.set_default_device("cpu"), torch.set_grad_enabled(False)
    torch.use_deterministic_algorithms(True, warn_only=True), torch.set_float32_matmul_precision("high")
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.backends.cudnn.enabled = torch.backends.cudnn.allow_tf32 = torch.backends.mkldnn.enabled = False
    torch.backends.cudnn.benchmark = torch.backends.cudnn.deterministic = True
    matmul = torch.backends.cuda.matmul
    matmul.allow_fp16_reduced_precision_reduction = matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.enable_flash_sdp(False), torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_math_sdp(False), torch.backends.cuda.enable_cudnn_sdp(False)
    torch.autograd.set_detect_anomaly(True, False), torch.set_warn_always(True)
    torch.set_printoptions(precision=2), torch.multiprocessing.set_sharing_strategy("file_system")
    torch.distributions.Distribution.set_default_validate_args(False)
    warnings.filterwarnings("error", "a text of the script")

def seen():
    found = {one.name: one.capture(sys.modules[one.module]) for one in SETTINGS if one.module in sys.modules}
    del found["logging"], found["warnings.filters"]
    try:
        warnings.warn("a text of the script")
    except UserWarning:
        return {**found, "warning": "is an error"}
    return found

def compare(where):
    for name, value in seen().items():
        assert repr(value) == repr(WANTED[name]), f"{where}: {name} is {value!r}, not {WANTED[name]!r}"
    return where

def tell(where):
    sys.stdout.write(f"as in the script: {where}\\n")  # in one piece, as others write as well

class Server:
    def __init__(self):
        self.batched = lp.batched_handler(batch_size=1)(self.batched)
    def plain(self):
        return compare("handler")
    async def asynchronous(self):
        return compare("async handler")
    def generator(self):
        yield compare("generator")
    def batched(self, _):
        return [compare("batched handler")]

def drive(server):
    done = queue.Queue()
    server.futures.plain().add_done_callback(lambda _: done.put(compare("callback")))
    found = compare("node"), server.plain(), server.asynchronous(), *server.generator(), server.batched(0), done.get()
    tell(", ".join(found))

def fail_once(flag):
    if not os.path.exists(flag):
        open(flag, "w").close()
        raise ValueError("as planned")
    tell(compare("restarted"))

def alone(where):
    import torch.distributions
    tell(compare(where))

if __name__ == "__main__":
    set_all()
    WANTED = seen()
    print("not set:", *(one.name for one in SETTINGS if one.name in WANTED and WANTED[one.name] == one.default))
    program = lp.Program("settings")
    server = program.add_node(lp.CourierNode(Server), label="server")
    with program.group("again", on_failure="restart"):
        program.add_node(lp.PyNode(fail_once, "flag"))
    with program.group("fresh", resources=lp.Resources(fresh_interpreter=True)):
        program.add_node(lp.PyNode(alone, "fresh"))
    program.add_node(lp.MultiThreadingColocation([lp.PyNode(alone, "thread of a colocation")]), label="threads")
    program.add_node(lp.MultiProcessingColocation([lp.PyNode(alone, "process of a colocation")]), label="processes")
    program.add_node(lp.PyNode(drive, server), label="driver")
    run = lp.launch(program, sys.argv[1])
    def is_over(label):
        return label == "server" or run.status()[label][0]["state"] in ("finished", "failed")
    while not all(map(is_over, run.status())):
        threading.Event().wait(0.05)
    run.stop()
    run.wait()
"""
PLACES = [
    "node, handler, async handler, generator, batched handler, callback",
    *("restarted", "fresh", "thread of a colocation", "process of a colocation"),
]


def run_script(source: str, folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    (folder / "script.py").write_text(source)
    command = [sys.executable, "script.py", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=WITHIN_S, check=False)


# With several hosts nodes are processes too, and get the same state.
@pytest.mark.parametrize("mode", ["thread", pytest.param("process", marks=pytest.mark.slow), "multi_host"])
def test_what_a_script_sets_for_its_process_holds_in_all_code_of_its_nodes(mode: str, tmp_path: Path) -> None:
    done = run_script(SCRIPT, tmp_path, mode)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "not set:\n" in done.stdout, "the script of this test leaves a setting at its default"
    for place in PLACES:
        assert f"as in the script: {place}\n" in done.stdout, done.stdout + done.stderr


LIGHT = """
import sys
import lp_pipe as lp

def node():
    print("loaded in the node:", sorted({"torch", "numpy", "absl"} & sys.modules.keys()))

program = lp.Program("light")
with program.group("fresh", resources=lp.Resources(fresh_interpreter=True)):
    program.add_node(lp.PyNode(node))
if __name__ == "__main__":
    if "without torch" not in sys.argv:
        import torch
    if "with torch.compile" in sys.argv:
        torch.compile(abs, backend="eager")  # changes settings of torch by itself
    lp.launch(program).wait()
    print("loaded in the script:", sorted({"torch", "absl"} & sys.modules.keys()))
"""


# To compile imports so much of torch that it takes several seconds.
@pytest.mark.parametrize(
    "torch", ["without torch", "with torch", pytest.param("with torch.compile", marks=pytest.mark.slow)]
)
def test_settings_that_are_as_always_import_nothing(torch: str, tmp_path: Path) -> None:
    done = run_script(LIGHT, tmp_path, torch)
    assert "loaded in the node: []\n" in done.stdout, done.stdout + done.stderr
    expected = [] if torch == "without torch" else ["torch"]
    assert f"loaded in the script: {expected}\n" in done.stdout


LEFT_OUT = """
import sys, threading
import numpy as np
import lp_pipe as lp

lock = threading.Lock()
def node():
    print("node:", np.geterrcall(), np.get_printoptions()["precision"])

np.seterrcall(lambda *parts: lock.acquire())
np.set_printoptions(precision=3)
program = lp.Program("left out")
program.add_node(lp.PyNode(node), label="node")
lp.launch(program).wait()
"""


def test_a_setting_that_does_not_pickle_is_named_and_keeps_no_other_out(tmp_path: Path) -> None:
    done = run_script(LEFT_OUT, tmp_path)
    assert "node: None 3\n" in done.stdout, done.stdout + done.stderr
    assert "numpy.seterrcall" in done.stderr
