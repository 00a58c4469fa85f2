"""Tables for terminals and for `grep`: aligned columns without borders."""

from collections.abc import Sequence


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return left-aligned columns with two blanks between them; columns without any value are left out."""
    used = [place for place in range(len(head)) if any(row[place] for row in rows)]
    lines = [[row[place] or "-" for place in used] for row in (head, *rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(used))]
    padded = ("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)) for line in lines)
    return "\n".join(line.rstrip() for line in padded)


def duration(seconds: float) -> str:
    """Return a duration as text, such as 4.2 s, 3 min 20 s, 5 h 2 min or 3 d 4 h."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    for unit, name, part, part_name in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if seconds >= unit:
            return f"{int(seconds // unit)} {name} {int(seconds % unit // part)} {part_name}"
    raise AssertionError("a minute is the smallest unit above")
