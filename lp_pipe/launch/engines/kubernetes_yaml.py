"""A cluster's objects as people write them."""

from collections.abc import Sequence
from typing import Any

import yaml

from lp_pipe.launch.engines.kubernetes_manifest import Object


def as_yaml(objects: Sequence[Object]) -> str:
    """One document each, for `kubectl apply -f -`."""
    return str(yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, width=120))


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]  # see pyproject.toml
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> Any:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)
