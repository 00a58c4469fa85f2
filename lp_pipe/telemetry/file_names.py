"""File names made from names that users choose: labels, hosts, parts of a checkpoint."""

import hashlib
import unicodedata
from collections.abc import Collection, Iterable

_ALSO_SIMPLE = "-_.+=@, "
_MOST_BYTES = 150  # file systems allow 255, and the caller adds an ending
_KEPT_BYTES = 40  # how much of a replaced name stays readable
_HASH_DIGITS = 12


def file_name(text: str) -> str:
    """Return `text` if it is a valid file name on every file system; else its simple letters, "~" and a hash.

    Two texts never get the same name, except on a file system that ignores case: use `distinct_names` for these.
    """
    return text if _is_simple(text) else hashed_name(text)


def hashed_name(text: str) -> str:
    """Return the first simple letters of `text`, "~", and a hash of all of it."""
    digest = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:_HASH_DIGITS]
    simple = "".join(char if (char.isascii() and char.isalnum()) or char in "-_" else "_" for char in text)
    return f"{simple[:_KEPT_BYTES].lstrip('-') or '_'}~{digest}"


def distinct_names(texts: Collection[str]) -> dict[str, str]:
    """Return the `file_name` of each text; texts that differ only in case get a hash, which tells them apart."""
    folded: dict[str, int] = {}
    for text in texts:
        folded[text.casefold()] = folded.get(text.casefold(), 0) + 1
    return {text: hashed_name(text) if folded[text.casefold()] > 1 else file_name(text) for text in texts}


def log_names(node_ids: Iterable[str]) -> dict[str, str]:
    """Return the name of every node's log file, by node_id: "trainer/0" has trainer-0.log."""
    parts = {node_id: node_id.rpartition("/") for node_id in node_ids}
    labels = distinct_names({label for label, _, _ in parts.values()})
    return {node_id: f"{labels[label]}-{index}.log" for node_id, (label, _, index) in parts.items()}


def node_of_log(name: str) -> str:
    """Return the node_id that the name of a log file says; wrong for labels that `file_name` has replaced."""
    label, _, index = name.removesuffix(".log").rpartition("-")
    return f"{label}/{index}"


def _is_simple(text: str) -> bool:
    return (
        all(char.isalnum() or char in _ALSO_SIMPLE for char in text)
        and text == text.strip(" ").rstrip(".")  # some file systems drop these at the end of a name
        and text[:1] not in ("", ".", "-")  # an empty name, a hidden file, an option on a command line
        and len(text.encode()) <= _MOST_BYTES
        and unicodedata.is_normalized("NFC", text)  # file systems that normalize would store two spellings as one
    )
