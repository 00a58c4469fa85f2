"""The lines of a stream as a terminal shows them: finished lines once, bars in their last state, prompts unchanged."""

import pytest

from lp_pipe.telemetry.terminal_lines import TerminalLines, Unfinished


def last_states(*pieces: bytes) -> list[bytes]:
    """Return all lines of a stream that ends behind these pieces."""
    lines = TerminalLines()
    found = [line for now, piece in enumerate(pieces) for line in lines.feed(piece, float(now))]
    return found + lines.close()


def test_lines_come_at_once_and_what_has_no_end_is_shown_after_a_moment_and_settles() -> None:
    lines = TerminalLines()
    assert lines.feed(b"one\ntwo\nPass", 0.0) == [b"one", b"two"]
    assert lines.due == pytest.approx(0.1)
    assert lines.look(0.05) == ([], None)
    assert lines.look(0.1) == ([], Unfinished(b"Pass", False))
    assert lines.feed(b"word: ", 0.2) == []
    assert lines.look(0.4) == ([], Unfinished(b"Password: ", False))
    assert lines.look(1.3) == ([], Unfinished(b"Password: ", True))
    assert lines.due is None
    assert lines.feed(b"ok\n", 5.0) == [b"Password: ok"]
    assert lines.due is None


def test_a_bar_is_shown_in_its_newest_state_and_kept_in_its_last() -> None:
    lines = TerminalLines()
    for step in range(30):
        assert lines.feed(b"\rstep %d/29" % step, 0.01 * step) == []
    assert lines.look(0.3) == ([], Unfinished(b"step 29/29", False))
    assert lines.look(60.0) == ([], None)  # a slow step is no prompt
    assert lines.feed(b"\n", 60.0) == []
    finished, _ = lines.look(60.1)
    assert finished == [b"step 29/29"]


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        (b"half\rfull\n", [b"full"]),
        (b"longer\rshort\n", [b"shortr"]),
        (b"longer\r\x1b[Kshort\n", [b"short"]),
        (b"gone\x1b[2K\rhere\n", [b"here"]),
        (b"a line of DOS\r\nanother\r\n", [b"a line of DOS", b"another"]),
        (b"state at the end\r", [b"state at the end"]),
        (b"|\b/\b-\bspun\n", [b"spun"]),
        (b"\r\xe2\x96\x88\xe2\x96\x88\r\xe2\x96\x91\n", [b"\xe2\x96\x91\xe2\x96\x88"]),
        (b"\xff\xfe\r\xfd\n", [b"\xfd\xfe"]),  # no UTF-8
        (b"\x1b[31mred\x1b[0m and plain\n", [b"\x1b[31mred\x1b[0m and plain"]),
        (b"....\r\x1b[32mgreen\x1b[0m\n", [b"\x1b[32mgreen\x1b[0m"]),
        (b"\x1b[12Cindented\n", [b" " * 12 + b"indented"]),
        (b"one\n\n\nfour\n", [b"one", b"", b"", b"four"]),
        (b"\x1b[999A\x1b[9999999999Bup and down\x1b[", [b"up and down\x1b["]),
    ],
)
def test_edits_of_a_row_are_carried_out(written: bytes, shown: list[bytes]) -> None:
    assert [line for line in last_states(written) if line or b"" in shown] == shown
    assert last_states(*(bytes([byte]) for byte in written)) == last_states(written)


def test_nested_bars_are_two_rows_and_end_as_the_terminal_would_show_them() -> None:
    """Write as tqdm draws them: down, the inner bar, up again, each a write of its own."""
    lines = TerminalLines()
    now = 0.0
    for epoch in range(3):
        assert lines.feed(b"\repoch %d" % epoch, now) == []
        for batch in range(5):
            for piece in (b"\n", b"\rbatch %d" % batch, b"\x1b[A"):
                now += 0.01
                assert lines.feed(piece, now) == []
        now += 0.1
        assert lines.look(now) == ([], Unfinished(b"epoch %d\nbatch 4" % epoch, False))
    for piece in (b"\n", b"\r       ", b"\r", b"\x1b[A", b"\repoch 3", b"\n"):
        assert lines.feed(piece, now) == []
    assert lines.feed(b"done\n", now + 0.2) == [b"epoch 3", b"done"]


def test_rows_that_are_drawn_with_a_hidden_cursor_are_finished_when_it_shows_again() -> None:
    """Write as rich draws its bars."""
    lines = TerminalLines()
    lines.feed(b"\x1b[?25l", 0.0)
    for step in range(20):
        frame = b"down %d\nup %d" % (step, step)
        assert lines.feed(frame if not step else b"\r\x1b[2K\x1b[1A\x1b[2K" + frame, step / 10) == []
    assert lines.look(2.0)[1] == Unfinished(b"down 19\nup 19", False)
    assert lines.feed(b"\n\x1b[?25h", 2.1) + lines.look(2.3)[0] == [b"down 19", b"up 19"]


def test_a_cursor_that_stays_hidden_delays_lines_by_a_second_at_most() -> None:
    lines = TerminalLines()
    lines.feed(b"\x1b[?25lone\n", 0.0)
    assert lines.due is not None and lines.due <= 1.0
    assert [line for at in (0.1, 1.0) for line in lines.look(at)[0]] == [b"one"]


def test_a_bar_without_an_end_and_a_line_without_an_end_take_bounded_memory() -> None:
    lines = TerminalLines()
    for step in range(20_000):
        lines.feed(b"\r%d of many, and still at it" % step, 0.0)
    assert sum(len(row.raw) for row in lines._rows) < 4096
    assert lines.close() == [b"19999 of many, and still at it"]
    lines = TerminalLines()
    pieces = [line for _ in range(40) for line in lines.feed(b"x" * (1 << 16), 0.0)]
    assert sum(map(len, [*pieces, *lines.close()])) == 40 << 16 and len(pieces) >= 2
    assert lines.look(1.0)[1] is None


def test_what_was_shown_is_taken_back_when_it_is_erased() -> None:
    lines = TerminalLines()
    lines.feed(b"\rdownloading", 0.0)
    assert lines.look(0.1)[1] == Unfinished(b"downloading", False)
    lines.feed(b"\r\x1b[K", 0.2)
    assert lines.look(0.4)[1] == Unfinished(b"", False)
    assert lines.close() == []
