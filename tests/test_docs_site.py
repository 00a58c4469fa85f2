"""The docs site has every page, public name and error, and no link that leads nowhere."""

import re
from pathlib import Path

import pytest

import lp_pipe as lp
import lp_pipe.pipeline as pp
from lp_pipe import errors
from tools.build_docs import build


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    build(folder)
    return folder


def test_every_link_leads_to_a_page_and_an_anchor(site: Path) -> None:
    pages = site / "docs"
    wrong = []
    for page in pages.rglob("*.md"):
        if "source" in page.relative_to(pages).parts:
            continue
        for path, anchor in re.findall(r"\]\(([^)#\s:]*)(?:#([^)\s]*))?\)", page.read_text(encoding="utf-8")):
            target = (page.parent / path) if path else page
            if not target.exists():
                wrong.append(f"{page.name}: {path}")
            elif anchor and target.suffix == ".md" and anchor not in anchors_of(target):
                wrong.append(f"{page.name}: {path}#{anchor}")
    assert not wrong


def anchors_of(page: Path) -> set[str]:
    headings = re.findall(r"(?m)^#+ (.*)$", page.read_text(encoding="utf-8"))
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def test_every_page_is_in_the_menu(site: Path) -> None:
    menu = (site / "zensical.toml").read_text()
    pages = [path.relative_to(site / "docs").as_posix() for path in (site / "docs").rglob("*.md")]
    assert [page for page in pages if f'"{page}"' not in menu and not page.startswith("source/")] == []


@pytest.mark.parametrize(("module", "name"), [(lp, "lp_pipe"), (pp, "lp_pipe.pipeline")])
def test_the_reference_has_every_public_name(module: object, name: str, site: Path) -> None:
    text = (site / "docs" / "api" / f"{name}.md").read_text()
    classes = [one for one in dir(module) if isinstance(getattr(module, one), type) and not one.startswith("_")]
    assert [one for one in classes if f"\n## {one}\n" not in text] == []
    assert " at 0x" not in text


def test_the_catalogue_has_every_error(site: Path) -> None:
    text = (site / "docs" / "errors.md").read_text()
    names = [name for name, found in vars(errors).items() if isinstance(found, type) and issubclass(found, Exception)]
    assert [name for name in names if f"\n## {name}\n" not in text] == []
    assert "Is a `LpPipeError`, `ConnectionError`" in text.replace("`OSError`", "")
