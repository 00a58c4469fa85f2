"""The shape of the package: forwarders, names of classes, and small modules."""

import ast
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "lp_pipe"
MAX_FORWARDERS = 47  # the goal is 40; most are methods of an interface, which a member implements
SAME_ROLE = {"Ping"}  # a notice between launcher and node, and a command to a stage worker
SMALL_LINES = 60

Function = ast.FunctionDef | ast.AsyncFunctionDef


def modules() -> dict[str, tuple[Path, ast.Module]]:
    """Return every module by its dotted name, without generated code."""
    paths = [path for path in PACKAGE.rglob("*.py") if "_pb2" not in path.name]
    return {dotted(path): (path, ast.parse(path.read_text(encoding="utf-8"))) for path in sorted(paths)}


def dotted(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def classes(tree: ast.Module) -> Iterator[ast.ClassDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))


def is_forwarder(function: Function) -> bool:
    """Return whether a method only calls a method of a member, `self.member.method(…)`, with its own arguments."""
    if any(re.search("property|abstract", ast.dump(decorator)) for decorator in function.decorator_list):
        return False
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    if len(body) != 1 or not isinstance(body[0], ast.Return | ast.Expr):
        return False
    call = body[0].value
    call = call.value if isinstance(call, ast.Await) else call
    if not (isinstance(call, ast.Call) and re.fullmatch(r"self\.\w+\.\w+", ast.unparse(call.func))):
        return False
    arguments = function.args
    names = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    own = {name.arg for name in names if name is not None}
    passed = [*call.args, *(keyword.value for keyword in call.keywords)]
    return all(ast.unparse(value).removeprefix("*") in own for value in passed)


def forwarders() -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{function.lineno}: {owner.name}.{function.name}"
        for path, tree in modules().values()
        for owner in classes(tree)
        for function in owner.body
        if isinstance(function, Function) and is_forwarder(function)
    ]


def imported_modules(tree: ast.Module, known: dict[str, tuple[Path, ast.Module]]) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if name in known else node.module for name in whole}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


def small_modules_with_one_importer() -> list[str]:
    known = modules()
    importers: dict[str, set[str]] = defaultdict(set)
    for name, (_, tree) in known.items():
        for target in imported_modules(tree, known):
            importers[target].add(name)
    return [
        f"{path.relative_to(ROOT)}, of {next(iter(importers[name]))}"
        for name, (path, _) in known.items()
        if len(importers[name]) == 1 and len(path.read_text(encoding="utf-8").splitlines()) < SMALL_LINES
    ]


def class_names_in_two_modules() -> list[str]:
    names = Counter(name for _, tree in modules().values() for name in {owner.name for owner in classes(tree)})
    return sorted(name for name, count in names.items() if count > 1)


def test_few_methods_only_forward() -> None:
    found = forwarders()
    assert len(found) <= MAX_FORWARDERS, "\n".join([f"{len(found)} forwarders:", *found])


def test_a_class_name_is_in_one_module() -> None:
    assert set(class_names_in_two_modules()) <= SAME_ROLE


def test_every_file_that_the_architecture_names_exists() -> None:
    pages = [ROOT / "docs" / "architecture.md", *(ROOT / "docs" / "decisions").glob("*.md")]
    for page in pages:
        for name in re.findall(r"`([\w/]+/[\w/]*\w+\.(?:py|proto))`", page.read_text(encoding="utf-8")):
            assert (PACKAGE / name).exists() or (ROOT / name).exists(), f"{page.name} names {name}"


if __name__ == "__main__":  # list what the tests count, and small modules that their only importer could contain
    parts = ["forwarders:", *forwarders(), "small modules:", *small_modules_with_one_importer(), ""]
    sys.stdout.write("\n".join(parts))
