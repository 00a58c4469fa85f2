"""The plugin in a user's hands: whole test files, run by a pytest of their own that knows lp_pipe only as installed."""

import sys
import textwrap

import pytest

pytest_plugins = ["pytester"]

ADDER = """
import lp_pipe as lp

class Adder:
    def __init__(self):
        self.total = 0

    def add(self, amount):
        self.total += amount
        return self.total

    def fail(self):
        raise ValueError("the adder is full")

def adder():
    program = lp.Program("adding")
    program.add_node(lp.CourierNode(Adder), label="adder")
    return program

def failing():
    def fail():
        raise ValueError("out of paint")
    program = lp.Program("failing")
    program.add_node(lp.PyNode(fail), label="painter")
    return program
"""


@pytest.fixture
def run_tests(pytester: pytest.Pytester, no_leaks: None) -> "RunTests":
    return RunTests(pytester)


class RunTests:
    def __init__(self, pytester: pytest.Pytester) -> None:
        self._pytester = pytester

    def __call__(self, body: str, *options: str) -> pytest.RunResult:
        self._pytester.makepyfile(ADDER + textwrap.dedent(body))
        without = ("-p", "no:cacheprovider", "-p", "no:hypothesispytest")  # half of such a pytest's start
        return self._pytester.runpytest_subprocess(*without, "-o", "lp_leak_patience=0.3", *options, timeout=100)


def test_the_first_tmp_path_of_a_session_is_no_leak(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    # pytest makes its own folder (pytest-of-USER) for it, which was found in the temporary folder of the test.
    monkeypatch.delenv("PYTEST_DEBUG_TEMPROOT")  # pytester's own, for the tests that it runs
    pytester.makepyfile(ADDER + "def test_adding(launched, tmp_path):\n    launched(adder())\n")
    options = ("-p", "no:cacheprovider", "-p", "no:hypothesispytest", "-o", "lp_leak_patience=0.3")
    result = pytester.run(sys.executable, "-m", "pytest", *options, timeout=100)  # without a --basetemp
    result.assert_outcomes(passed=1)


def test_a_test_that_leaves_nothing_passes(run_tests: RunTests) -> None:
    result = run_tests("""
        def test_adding(launched):
            run = launched(adder())
            assert run.client("adder").add(2) == 2

        def test_two_programs_at_a_time(launched):
            one, other = launched(adder()), launched(adder())
            one.client("adder").add(2)
            assert other.client("adder").add(2) == 2
            assert one.client("adder").add(2) == 4

        def test_a_program_that_the_test_stops_itself(launched):
            with launched(adder()) as run:
                run.client("adder").add(2)
    """)
    result.assert_outcomes(passed=3)


@pytest.mark.parametrize(("options", "is_same"), [((), True), (("--lp-mode=process",), False)])
def test_the_mode_is_thread_or_what_the_command_line_says(
    run_tests: RunTests, options: tuple[str, ...], is_same: bool
) -> None:
    result = run_tests(
        f"""
        import os

        def test_the_mode(launched):
            assert (launched(adder()).client("adder").add(0) == 0)
            pid = launched(adder()).status()["adder"][0]["pid"]
            assert (pid == os.getpid()) is {is_same}

        def test_the_mode_that_the_test_says_wins(launched):
            run = launched(adder(), "thread", grace=1.0)
            run.client("adder").add(1)
            assert run.status()["adder"][0]["pid"] == os.getpid()
    """,
        *options,
    )
    result.assert_outcomes(passed=2)


def test_an_unknown_mode_is_wrong_usage_and_no_failure_of_each_test(run_tests: RunTests) -> None:
    result = run_tests("def test_the_mode(launched): launched(adder())", "--lp-mode=fibre")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*argument --lp-mode: invalid choice: 'fibre' (choose from *thread*process*"])


@pytest.mark.parametrize(
    ("leak", "named"),
    [
        ("threading.Thread(target=time.sleep, args=(2,), name='poller').start()", "*thread 'poller'*"),
        ("kept.append(subprocess.Popen(['sleep', '2.345']))", "*process * sleep 2.345*"),
        ("kept.append(socket.socket())", "*socket *AF_INET*"),
        ("tempfile.mkdtemp(prefix='forgotten-')", "*temporary file: forgotten-*"),
    ],
)
def test_a_test_that_leaves_something_fails_and_names_it(run_tests: RunTests, leak: str, named: str) -> None:
    result = run_tests(f"""
        import socket, subprocess, tempfile, threading, time
        kept = []

        def test_leaking(launched):
            launched(adder()).client("adder").add(1)
            {leak}
    """)
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*AssertionError: 1 leaked:*", named])


def test_a_node_that_leaves_something_fails_the_test_too(run_tests: RunTests) -> None:
    result = run_tests(
        """
        import tempfile

        class Careless:
            def __init__(self):
                tempfile.mkdtemp(prefix="careless-")

        def test_leaking(launched):
            program = lp.Program("careless")
            program.add_node(lp.CourierNode(Careless), label="careless")
            launched(program).client("careless")
    """,
        "--lp-mode=process",
    )
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*temporary file: careless-*"])


def test_things_of_fixtures_that_end_with_the_test_are_no_leaks(run_tests: RunTests) -> None:
    result = run_tests("""
        import socket, threading
        import pytest

        @pytest.fixture
        def poller(launched):
            ended = threading.Event()
            thread = threading.Thread(target=ended.wait)
            thread.start()
            with socket.socket():
                yield
            ended.set()
            thread.join()

        def test_with_a_fixture_of_my_own(launched, poller):
            launched(adder()).client("adder").add(1)
    """)
    result.assert_outcomes(passed=1)


def test_a_failed_node_fails_the_test_that_did_not_look(run_tests: RunTests) -> None:
    result = run_tests("""
        def test_not_looking(launched):
            run = launched(failing())
            while run.failure is None:
                pass
    """)
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines(["*NodeError: node painter/0 failed: ValueError: out of paint*"])


def test_a_failure_that_the_test_has_seen_is_expected(run_tests: RunTests) -> None:
    result = run_tests("""
        import pytest

        def test_waiting(launched):
            with pytest.raises(lp.NodeError, match="out of paint"):
                launched(failing()).wait()

        def test_the_end_of_the_block(launched):
            with pytest.raises(lp.NodeError, match="out of paint"):
                with launched(failing()) as run:
                    while run.failure is None:
                        pass

        def test_a_remote_error_is_no_failure_of_the_node(launched):
            with pytest.raises(ValueError, match="full"):
                launched(adder()).client("adder").fail()
    """)
    result.assert_outcomes(passed=3)


def test_the_tests_own_failure_wins_and_the_nodes_is_shown_with_it(run_tests: RunTests) -> None:
    result = run_tests("""
        import threading

        def test_failing(launched):
            run = launched(failing())
            threading.Thread(target=threading.Event().wait, daemon=True).start()  # no word of this
            while run.failure is None:
                pass
            assert 1 + 1 == 3
    """)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*assert (1 + 1) == 3*", "*node painter/0 failed*", "*out of paint*"])
    result.stdout.no_fnmatch_line("*leaked*")


def test_faults_are_there_for_who_asks(run_tests: RunTests) -> None:
    result = run_tests("""
        import pytest

        @pytest.fixture
        def running(launched):  # launches before the test gets its faults
            return launched(adder())

        def test_partition(running, faults):
            client = running.client("adder")
            assert client.add(1) == 1
            with faults.partition(running, faults.LAUNCHER, "adder") as fault:
                late = client.futures.add(1)
                with pytest.raises(TimeoutError):
                    late.result(0.1)
            assert late.result(10) == 2
            assert fault.hits

        def test_afterwards_connections_are_the_usual_ones(launched):
            from lp_pipe.testing import faults
            with pytest.raises(RuntimeError, match="fixture `faults`"):
                faults.cut(launched(adder()), faults.LAUNCHER, "adder")
    """)
    result.assert_outcomes(passed=2)


def test_the_plugin_costs_a_pytest_without_programs_little(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("""
        import sys

        def test_what_was_imported():
            assert "lp_pipe.testing.plugin" in sys.modules
            heavy = {"torch", "numpy", "grpc", "asyncio", "rich"}
            assert not heavy & set(sys.modules)
    """)
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", *no_other_plugins(), timeout=100)
    result.assert_outcomes(passed=1)


def no_other_plugins() -> list[str]:
    names = ("hypothesispytest", "xdist", "xdist.looponfail", "anyio")
    return [option for name in names for option in ("-p", f"no:{name}")]
