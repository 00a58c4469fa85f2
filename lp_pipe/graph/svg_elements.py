"""The parts that all pictures of this project share: the frame, the fonts, and how an SVG element is made."""

import re
from typing import Any
from xml.etree import ElementTree as ET

INK, FAINT_INK = "#1f2733", "#6b7685"
_FONT = "Inter, 'Segoe UI', 'Helvetica Neue', Helvetica, Arial, 'DejaVu Sans', sans-serif"

# Characters that XML cannot hold, not even escaped: control characters, and bytes of file names that are not text.
_NOT_IN_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def make_picture(title: str, width: float, height: float) -> ET.Element:
    """Return an empty picture; `title` is for screen readers, and shown on hovering."""
    root = ET.Element("svg", xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {width:.0f} {height:.0f}")
    root.attrib.update({"width": f"{width:.0f}", "height": f"{height:.0f}", "font-family": _FONT, "role": "img"})
    add(root, "title", title)
    return root


def add_heading(root: ET.Element, name: str, subtitle: str, margin: float) -> None:
    """Add the background, and two lines at the top."""
    add(root, "rect", width="100%", height="100%", rx=16, fill="#ffffff")
    add(root, "text", name, x=margin, y=margin + 12, font_size=20, font_weight=700, fill=INK)
    add(root, "text", subtitle, x=margin, y=margin + 32, font_size=12, fill=FAINT_INK)


def add(parent: ET.Element, tag: str, text: str | None = None, **attributes: Any) -> ET.Element:
    """Add a new element and return it; `font_size` becomes `font-size`, numbers get two decimals at most."""
    values = {name.replace("_", "-"): written(value) for name, value in attributes.items()}
    element = ET.SubElement(parent, tag, values)
    element.text = text
    return element


def to_text(root: ET.Element, indent: str = "  ") -> str:
    """Return the finished picture as the text of a file."""
    ET.indent(root, space=indent)
    return _NOT_IN_XML.sub("\N{REPLACEMENT CHARACTER}", ET.tostring(root, encoding="unicode")) + "\n"


def written(value: Any, decimals: int = 2) -> str:
    """Return a number, or anything else, as SVG writes it."""
    return f"{value:.{decimals}f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
