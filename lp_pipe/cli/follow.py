"""Log files of nodes, read as they grow."""

from pathlib import Path

from lp_pipe.telemetry.run_folder import RunFolder


class LogFile:
    """One node's file; `new_lines` gives each line once.

    node: its node_id, "label/index"; of a process inside a colocation "label/index.place".
    """

    def __init__(self, path: Path, node: str) -> None:
        self.path = path
        self.node = node
        self.label, _, self._index = node.rpartition("/")
        self._place = 0
        self._unfinished = b""

    @property
    def order(self) -> tuple[str, list[int]]:
        """stage/2 before stage/10."""
        return self.label, [int(part) for part in self._index.split(".") if part.isdecimal()]

    def is_of(self, node: str) -> bool:
        """Whether `node` is its node, the colocation around it, or its group."""
        return node in (self.node, self.label) or self.node.startswith(f"{node}.")

    def new_lines(self, with_unfinished: bool = False) -> list[str]:
        """What has come since the last call, whole lines only; `with_unfinished`: no more will come."""
        with self.path.open("rb") as file:
            file.seek(self._place)
            data = file.read()
        self._place += len(data)
        *lines, self._unfinished = (self._unfinished + data).split(b"\n")
        if with_unfinished and self._unfinished:
            lines, self._unfinished = [*lines, self._unfinished], b""
        return [line.decode(errors="replace") for line in lines]


def log_files(folder: RunFolder) -> list[LogFile]:
    """Return the files of all nodes that have printed something."""
    return sorted((LogFile(path, node) for node, path in folder.node_logs().items()), key=lambda file: file.order)
