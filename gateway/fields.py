"""Strict reading of one JSON object: each value is checked once, and every complaint names the field.

Knows JSON and numbers, nothing of chats. A boolean is not a number, and a null counts as absent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn, cast

from gateway.errors import InvalidRequest, shorten

if TYPE_CHECKING:
    from collections.abc import Iterator

JsonObject = dict[str, object]

MAX_JSON_DEPTH = 64
"""Deepest nesting of values that are passed on to the template."""


def refuse(param: str, message: str) -> NoReturn:
    """Raise InvalidRequest for a field; the message starts with its name."""
    raise InvalidRequest(f"{param} {message}", param=param)


def describe(value: object) -> str:
    """Type and, for short scalars, value: for messages."""
    match value:
        case bool():
            return f"the boolean {str(value).lower()}"
        case int() | float():
            return f"the number {shorten(str(value))}"
        case str():
            return f"the string {shorten(value)!r}"
        case list():
            return "an array"
        case dict():
            return "an object"
        case _:
            return "null"


@dataclass(frozen=True, slots=True)
class Fields:
    """One JSON object and where it stands in the body (`path` is empty or ends with a dot)."""

    values: JsonObject
    path: str = ""

    def param(self, name: str) -> str:
        """The full name of a field."""
        return self.path + name

    def get(self, name: str) -> object:
        """The value as it came; None when absent."""
        return self.values.get(name)

    def integer(self, name: str, low: int, high: int) -> int | None:
        """A whole number in [low, high]."""
        value = self.values.get(name)
        if value is None:
            return None
        return check_integer(self.param(name), value, low, high)

    def number(self, name: str, low: float, high: float, *, open_low: bool = False) -> float | None:
        """A finite number in [low, high], or in (low, high]."""
        value = self.values.get(name)
        if value is None:
            return None
        return check_number(self.param(name), value, low, high, open_low=open_low)

    def boolean(self, name: str) -> bool | None:
        """True or false."""
        value = self.values.get(name)
        if value is None or isinstance(value, bool):
            return value
        refuse(self.param(name), f"must be a boolean; found {describe(value)}")

    def string(self, name: str) -> str | None:
        """A string, the empty one included."""
        value = self.values.get(name)
        if value is None or isinstance(value, str):
            return value
        refuse(self.param(name), f"must be a string; found {describe(value)}")

    def object(self, name: str) -> Fields | None:
        """A nested object."""
        value = self.values.get(name)
        if value is None:
            return None
        return as_object(self.param(name), value)

    def array(self, name: str) -> list[object] | None:
        """An array of anything."""
        value = self.values.get(name)
        if value is None:
            return None
        return as_array(self.param(name), value)

    def objects(self, name: str) -> Iterator[Fields]:
        """The objects of an array, each with its own path."""
        for index, item in enumerate(self.array(name) or []):
            yield as_object(f"{self.param(name)}[{index}]", item)

    def one_of(self, name: str, allowed: tuple[str, ...]) -> str | None:
        """One of a few strings."""
        value = self.string(name)
        if value is None or value in allowed:
            return value
        choices = ", ".join(repr(choice) for choice in allowed)
        refuse(self.param(name), f"must be one of {choices}; found {describe(value)}")


def as_object(param: str, value: object) -> Fields:
    """A value that must be an object."""
    if not isinstance(value, dict):
        refuse(param, f"must be an object; found {describe(value)}")
    return Fields(cast("JsonObject", value), f"{param}.")


def as_array(param: str, value: object) -> list[object]:
    """A value that must be an array."""
    if not isinstance(value, list):
        refuse(param, f"must be an array; found {describe(value)}")
    return cast("list[object]", value)


def check_integer(param: str, value: object, low: int, high: int) -> int:
    """A whole number in [low, high]; 3.0 is not one."""
    if isinstance(value, bool) or not isinstance(value, int):
        refuse(param, f"must be a whole number from {low} to {high}; found {describe(value)}")
    if not low <= value <= high:
        refuse(param, f"must be from {low} to {high}; found {value}")
    return value


def check_number(
    param: str, value: object, low: float, high: float, *, open_low: bool = False
) -> float:
    """A finite number in [low, high], or in (low, high]."""
    span = f"above {low:g} and at most {high:g}" if open_low else f"from {low:g} to {high:g}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        refuse(param, f"must be a number {span}; found {describe(value)}")
    if not math.isfinite(value) or not low <= value <= high or (open_low and value == low):
        refuse(param, f"must be {span}; found {shorten(str(value))}")
    return float(value)


def check_depth(param: str, value: object, depth: int = 0) -> None:
    """Refuse values that are nested deeper than MAX_JSON_DEPTH."""
    if depth > MAX_JSON_DEPTH:
        refuse(param, f"is nested more than {MAX_JSON_DEPTH} levels deep")
    if isinstance(value, dict):
        for item in cast("JsonObject", value).values():
            check_depth(param, item, depth + 1)
    elif isinstance(value, list):
        for item in cast("list[object]", value):
            check_depth(param, item, depth + 1)
