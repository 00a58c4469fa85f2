"""The names in a whole model as its users see them, and their order. Data only; needs no torch."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")
Place = tuple[int, int]  # what a whole state_dict is sorted by: a layer, and the position in its module's state_dict


@dataclass(frozen=True)
class ModelNames:
    """tied: all names of each parameter that has several.

    places: of all names in modules that were split. parameter_places: of their parameters; one with several names is
    where the first of them is.
    """

    tied: tuple[tuple[str, ...], ...]
    places: Mapping[str, Place]
    parameter_places: Mapping[str, Place]

    def whole(self, parts: Iterable[Mapping[str, T]]) -> dict[str, T]:
        """What stages have by name, together, in the order of the model's state_dict()."""
        return _together(parts, self.places)

    def whole_of_parameters(self, parts: Iterable[Mapping[str, T]]) -> dict[str, T]:
        """The same in the order of its parameters()."""
        return _together(parts, self.parameter_places)


def _together(parts: Iterable[Mapping[str, T]], places: Mapping[str, Place]) -> dict[str, T]:
    items = [item for part in parts for item in part.items()]
    return dict(sorted(items, key=lambda item: places.get(item[0]) or (int(item[0].split(".", 1)[0]), 0)))
