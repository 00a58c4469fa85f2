"""TensorBoard's event files, written without any package: records of a few fields in frames with checksums.

Source: TensorFlow's core/lib/io/record_writer.h (frames), and TensorBoard's event.proto, summary.proto, graph.proto and
plugins/hparams/plugin_data.proto (messages).
"""

import itertools
import os
import re
import socket
import struct
from collections import Counter
from collections.abc import Mapping
from typing import Any

from lp_pipe.telemetry.file_names import file_name
from lp_pipe.telemetry.file_writing import AppendOnlyFile
from lp_pipe.telemetry.sink_threads import MetricsRecord, RunSink, SinkRun

_file_numbers = itertools.count()
_NOT_IN_A_NODE_NAME = re.compile(r"[^\w.\-/]", re.ASCII)  # of TensorFlow's


class TensorBoardSink(RunSink):
    """Writes a file for each node, below RUN/tensorboard. Each record is complete in the file when the call returns."""

    def __init__(self) -> None:
        self._run = SinkRun()
        self._files: dict[str, AppendOnlyFile] = {}
        self._unnumbered: Counter[tuple[str, str]] = Counter()  # values without a step, by node and name

    def begin(self, run: SinkRun) -> None:
        self._run = run

    def __call__(self, record: MetricsRecord) -> None:
        data = b"".join(self._event(record, name, value) for name, value in record.values.items())
        self._file(record).opened().write(data)

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()
        self._unnumbered.clear()

    def _event(self, record: MetricsRecord, name: str, value: float) -> bytes:
        step = record.step
        if step is None:
            step = self._unnumbered[record.node, name]
            self._unnumbered[record.node, name] += 1
        return _framed(_event(record.time, _scalar(name, value), step))

    def _file(self, record: MetricsRecord) -> AppendOnlyFile:
        if record.node not in self._files:
            label, _, index = record.node.rpartition("/")
            folder = self._run.folder.tensorboard / file_name(f"{label}-{index}" if label else index)
            folder.mkdir(parents=True, exist_ok=True)
            self._files[record.node] = file = AppendOnlyFile(folder / _unused_name(record.time))
            file.opened().write(_framed(_double(1, record.time) + _bytes(3, b"brain.Event:2")))
            for summary in _about(self._run, record.time):
                file.opened().write(_framed(_event(record.time, summary)))
            graph = self._run.graph() if len(self._files) == 1 else {}  # one is enough: it is that of all nodes
            if graph:
                file.opened().write(_framed(_double(1, record.time) + _bytes(4, _graph(graph))))
        return self._files[record.node]

    def __repr__(self) -> str:
        return "lp.sinks.tensorboard()"


def _unused_name(now: float) -> str:
    """Return the name of a new file, as TensorBoard's own writers choose it: readers take the newest file's records."""
    return f"events.out.tfevents.{int(now):010d}.{socket.gethostname()}.{os.getpid()}.{next(_file_numbers)}"


def _about(run: SinkRun, now: float) -> list[bytes]:
    """Return the summaries that come first: the command as a text, and the program's flags as hyperparameters."""
    found = []
    if run.argv:
        found.append(_text("lp_pipe/command", " ".join(run.argv)))
    if parameters := run.hyperparameters():
        found.append(_hyperparameters(run, parameters, now))
    return found


def _scalar(tag: str, value: float) -> bytes:
    return _bytes(1, tag.encode()) + _tag(2, 5) + struct.pack("<f", _to_float32(value))


def _to_float32(value: float) -> float:
    try:
        struct.pack("<f", value)
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")
    return value


def _text(tag: str, text: str) -> bytes:
    tensor = _varint_field(1, 7) + _bytes(2, b"") + _bytes(8, text.encode())  # DT_STRING, a shape without dimensions
    return _bytes(1, tag.encode()) + _metadata("text") + _bytes(8, tensor)


def _hyperparameters(run: SinkRun, parameters: Mapping[str, str], now: float) -> bytes:
    entries = b"".join(
        _bytes(1, _bytes(1, name.encode()) + _bytes(2, _protobuf_value(value))) for name, value in parameters.items()
    )
    started = entries + _bytes(4, run.folder.path.name.encode()) + _double(5, now)
    tensor = _varint_field(1, 1) + _bytes(2, b"")  # DT_FLOAT, empty: the reader wants some tensor
    return _bytes(1, b"_hparams_/session_start_info") + _metadata("hparams", _bytes(3, started)) + _bytes(8, tensor)


def _graph(graph: Mapping[str, Any]) -> bytes:
    """Return a program as a GraphDef, which the page "Graphs" draws: each group is a scope, users point to servers."""
    users: dict[str, list[str]] = {}
    for edge in graph["edges"]:
        users.setdefault(edge["server"], []).append(edge["user"])
    nodes = b"".join(
        _bytes(1, _graph_node(node, [_graph_name(user) for user in users.get(node["name"], ())]))
        for node in graph["nodes"]
    )
    return nodes + _bytes(4, _varint_field(1, 22))  # the version of the format


def _graph_node(node: Mapping[str, Any], users: list[str]) -> bytes:
    facts = {"runs": node["runs"], **{f"note {place}": note for place, note in enumerate(node.get("notes", ()))}}
    attributes = b"".join(
        _bytes(5, _bytes(1, name.encode()) + _bytes(2, _bytes(2, text.encode()))) for name, text in facts.items()
    )
    inputs = b"".join(_bytes(3, user.encode()) for user in users)
    return _bytes(1, _graph_name(node["name"]).encode()) + _bytes(2, node["kind"].encode()) + inputs + attributes


def _graph_name(node: str) -> str:
    return _NOT_IN_A_NODE_NAME.sub("_", node).lstrip("/_-") or "node"


def _protobuf_value(text: str) -> bytes:
    """Return the text as a google.protobuf.Value: a number where it is one."""
    try:
        return _double(2, float(text))
    except ValueError:
        return _bytes(3, text.encode())


def _metadata(plugin: str, content: bytes = b"") -> bytes:
    return _bytes(9, _bytes(1, _bytes(1, plugin.encode()) + _bytes(2, content)))


def _event(when: float, value: bytes, step: int = 0) -> bytes:
    return _double(1, when) + _varint_field(2, step) + _bytes(5, _bytes(1, value))


# Fields of protobuf messages.


def _double(field: int, value: float) -> bytes:
    return _tag(field, 1) + struct.pack("<d", value)


def _bytes(field: int, value: bytes) -> bytes:
    return _tag(field, 2) + _varint(len(value)) + value


def _varint_field(field: int, value: int) -> bytes:
    return _tag(field, 0) + _varint(value & 0xFFFF_FFFF_FFFF_FFFF)  # negative numbers have 64 bits


def _tag(field: int, wire_type: int) -> bytes:
    return _varint(field << 3 | wire_type)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


# Frames: length, checksum of the length, data, checksum of the data.


def _framed(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + _masked_crc(length) + data + _masked_crc(data)


def _masked_crc(data: bytes) -> bytes:
    crc = 0xFFFF_FFFF
    for byte in data:
        crc = _CRC_TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFF_FFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282_EAD8) & 0xFFFF_FFFF)


def _crc_of_byte(crc: int) -> int:
    for _ in range(8):
        crc = crc >> 1 ^ (0x82F6_3B78 if crc & 1 else 0)  # CRC-32C (Castagnoli), reflected
    return crc


_CRC_TABLE = [_crc_of_byte(byte) for byte in range(256)]
