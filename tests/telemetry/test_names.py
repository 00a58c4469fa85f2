"""Signals as messages call them."""

import signal

from lp_pipe.telemetry.names import signal_name


def test_signals_go_by_their_names_and_those_without_by_their_numbers() -> None:
    assert signal_name(signal.SIGKILL) == "SIGKILL"
    assert signal_name(signal.SIGRTMIN + 6) == f"signal {signal.SIGRTMIN + 6}"
