"""Write the sources of the docs site: the pages of docs/, an API reference and an error catalogue from docstrings.

    python tools/build_docs.py build/docs     then, in that folder: zensical build --clean

README.md is the first page. A link from a page to a file of the repository leads to a page with its text.
"""

import importlib
import inspect
import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lp_pipe import errors

ROOT = Path(__file__).parent.parent
MODULES = (
    "lp_pipe",
    "lp_pipe.pipeline",
    "lp_pipe.data_parallel",
    "lp_pipe.checkpoint",
    "lp_pipe.programs.producers_consumer",
    "lp_pipe.programs.map_reduce",
    "lp_pipe.programs.evolution_strategies",
    "lp_pipe.programs.parameter_server",
    "lp_pipe.search",
    "lp_pipe.rl",
    "lp_pipe.testing",
    "lp_pipe.telemetry.sinks",
)
SECTIONS = {
    "Start": ("tutorial", "nodes", "runs", "watching", "metrics", "tracing", "hangs", "testing"),
    "Training": ("pipeline", "partitioning", "data", "data_parallel", "reliability", "gpu"),
    "More programs": ("programs", "search", "agents"),
    "Several hosts": ("multi_host", "security"),
}
CONFIG = """\
[project]
site_name = "lp_pipe"
site_description = "Program graphs for distributed Python, and training in torch on top of them"
use_directory_urls = false
nav = {nav}

[project.theme]
language = "en"
features = ["content.code.copy", "navigation.footer", "navigation.sections", "navigation.top", "search.highlight"]

[[project.theme.palette]]
media = "(prefers-color-scheme: light)"
scheme = "default"

[[project.theme.palette]]
media = "(prefers-color-scheme: dark)"
scheme = "slate"
"""
_LINK = re.compile(r"(\]\()([^)#\s]+)(#[^)]*)?(\))")
_ARGUMENT = re.compile(r"^ *(\w+(?:, \w+)*): ")  # "mode, grace: …" of a docstring
_FENCES = {".py": "python", ".toml": "toml", ".sh": "bash"}


def build(target: Path) -> None:
    """Write everything into a folder, which is emptied before."""
    shutil.rmtree(target, ignore_errors=True)
    pages = target / "docs"
    pages.mkdir(parents=True)
    files: set[Path] = set()
    for source in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "BUILD.md", *(ROOT / "docs").rglob("*")]:
        if source.is_dir() or not source.exists():
            continue
        place = pages / page_of(source)
        place.parent.mkdir(parents=True, exist_ok=True)
        if source.suffix == ".md":
            place.write_text(with_links(source, files), encoding="utf-8")
        else:
            shutil.copyfile(source, place)
    for file in files:
        write_source(pages, file)
    names = []
    for module in MODULES:
        (pages / "api").mkdir(exist_ok=True)
        (pages / "api" / f"{module}.md").write_text(reference(module), encoding="utf-8")
        names.append({module: f"api/{module}.md"})
    (pages / "errors.md").write_text(error_catalogue(), encoding="utf-8")
    (target / "zensical.toml").write_text(CONFIG.format(nav=_toml(navigation(pages, names))), encoding="utf-8")


def page_of(source: Path) -> Path:
    """Return where a file of the repository is on the site."""
    if source == ROOT / "README.md":
        return Path("index.md")
    if source.is_relative_to(ROOT / "docs"):
        return source.relative_to(ROOT / "docs")
    if source.suffix == ".md":
        return source.relative_to(ROOT)
    return Path("source") / f"{source.relative_to(ROOT)}.md"


def with_links(source: Path, files: set[Path]) -> str:
    """Return a page with its links as they are on the site; add files that it links to, to `files`."""
    here = page_of(source).parent

    def replaced(link: re.Match[str]) -> str:
        before, path, anchor, after = link.groups()
        found = (source.parent / path).resolve()
        if "://" in path or path.startswith("mailto:") or not found.exists():
            return link[0]
        if found.is_dir():
            return f"{before}{path}{anchor or ''}{after}"
        page = page_of(found)
        if page.parts[0] == "source":
            files.add(found)
        up = "../" * len(here.parts)
        return f"{before}{up}{page.as_posix()}{anchor or ''}{after}"

    return _LINK.sub(replaced, source.read_text(encoding="utf-8"))


def write_source(pages: Path, file: Path) -> None:
    """Write a page with the text of a file."""
    place = pages / page_of(file)
    place.parent.mkdir(parents=True, exist_ok=True)
    fence = _FENCES.get(file.suffix, "text")
    text = file.read_text(encoding="utf-8")
    place.write_text(f"# {file.relative_to(ROOT)}\n\n````{fence}\n{text}````\n", encoding="utf-8")


def reference(module_name: str) -> str:
    """Return the page of a module: what it offers, with signatures and docstrings."""
    module = importlib.import_module(module_name)
    lines = [f"# {module_name}", "", text_of(module), ""]
    for name in sorted(public_names(module), key=str.casefold):
        found = getattr(module, name)
        lines += [f"## {name}", "", *_described(name, found), ""]
        if inspect.isclass(found):
            for method, function in methods_of(found):
                lines += [f"### {name}.{method}", "", *_described(method, function), ""]
    return "\n".join(lines)


def public_names(module: Any) -> list[str]:
    """Return the names that a module offers to users: those of lp_pipe that have no underscore and are no modules."""
    names = [name for name in dir(module) if not name.startswith("_") and _is_ours(getattr(module, name))]
    is_package = hasattr(module, "__path__")  # which offers names of its modules
    return [name for name in names if is_package or getattr(module, name).__module__ == module.__name__]


def methods_of(kind: type) -> Iterator[tuple[str, Any]]:
    """Yield the public methods and properties that a class, or a base class of lp_pipe's, has documented."""
    for name in sorted(set(dir(kind))):
        if name.startswith("_"):
            continue
        owner = next((base for base in kind.__mro__ if name in vars(base)), object)
        found = inspect.getattr_static(kind, name)
        function = getattr(found, "__func__", found)
        if (
            _is_ours(owner)
            and (inspect.isfunction(function) or isinstance(found, property))
            and inspect.getdoc(function)
        ):
            yield name, function


def _is_ours(found: Any) -> bool:
    return (inspect.isclass(found) or inspect.isfunction(found)) and str(found.__module__).startswith("lp_pipe")


def _described(name: str, found: Any) -> list[str]:
    if isinstance(found, property):
        return [text_of(found)]
    try:
        signature = str(inspect.signature(found))
    except (TypeError, ValueError):
        signature = "(…)"
    signature = re.sub(r" at 0x[0-9a-f]+", "", signature)
    return ["```python", f"{name}{signature}", "```", "", text_of(found)]


def text_of(found: Any) -> str:
    """Return a docstring as Markdown: "Raises:" and indented parts become blocks."""
    lines, is_code = [], False
    for line in (inspect.getdoc(found) or "").splitlines():
        is_code = is_code or (line.startswith("    ") and (not lines or not lines[-1].strip()))
        is_code = is_code and (line.startswith("    ") or not line)
        lines.append(line if is_code else _ARGUMENT.sub(r"- `\1`: ", line.replace("Raises:", "Raises:\n")))
    return "\n".join(lines)


def error_catalogue() -> str:
    """Return a page with every exception: its base classes, what it means, and what docs/hangs.md says to do."""
    advice = _advice()
    rows = [
        "# Errors",
        "",
        "All of them derive from `LpPipeError`. [When something fails](hangs.md#errors) says what to do.",
        "",
    ]
    for name, found in sorted(vars(errors).items()):
        if inspect.isclass(found) and issubclass(found, Exception) and not name.startswith("_"):
            bases = ", ".join(f"`{base.__name__}`" for base in found.__mro__[1:-3])
            is_a = f"Is a {bases}." if bases else "Is an `Exception`."
            rows += [f"## {name}", "", is_a, "", inspect.getdoc(found) or "", ""]
            rows += [f"What to look at: {advice[name]}", ""] if name in advice else []
    return "\n".join(rows)


def _advice() -> dict[str, str]:
    """Return the last column of the table of errors, by the names in the first one; the first row of a name counts."""
    found: dict[str, str] = {}
    for line in (ROOT / "docs" / "hangs.md").read_text(encoding="utf-8").splitlines():
        cells = line.strip("|").split(" | ")
        if len(cells) == 3:
            for name in re.findall(r"`([A-Z]\w+)", cells[0]):
                found.setdefault(name, cells[2].strip().replace("](#", "](hangs.md#"))
    return found


def navigation(pages: Path, api: list[dict[str, str]]) -> list[dict[str, Any]]:
    """Return the menu; pages that are in no section come last, so that none is forgotten."""
    found: list[dict[str, Any]] = [{"lp_pipe": "index.md"}]
    for title, names in SECTIONS.items():
        found.append({title: [{_title(pages / f"{name}.md"): f"{name}.md"} for name in names]})
    known = {"index", "errors", *(name for names in SECTIONS.values() for name in names)}
    coming = sorted(path for path in pages.glob("coming_from_*.md"))
    found.append({"Coming from": [{_title(path): path.name} for path in coming]})
    others = [path for path in sorted(pages.glob("*.md")) if path.stem not in known and path not in coming]
    found.append({"Reference": [*api, {"Errors": "errors.md"}]})
    found.append({"Development": [{_title(path): path.name} for path in others]})
    decisions = [{_title(path): f"decisions/{path.name}"} for path in sorted((pages / "decisions").glob("*.md"))]
    return [*found, {"Decisions": decisions}]


def _title(page: Path) -> str:
    lines = (line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("# "))
    return next(lines, f"# {page.stem}").removeprefix("# ").replace("`", "")


def _toml(value: Any) -> str:
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return "{ " + ", ".join(f"{_toml(key)} = {_toml(one)}" for key, one in value.items()) + " }"


if __name__ == "__main__":
    build(Path(sys.argv[1]))
