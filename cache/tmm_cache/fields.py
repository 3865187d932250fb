"""Strict reading of JSON objects, so that every complaint names its field.

A cache file may come from a stranger's archive, a full disk or an editor. "KeyError: 'winner'"
helps nobody; "candidates[2].samples_us[0]: found -1.0, accepted is ..." does.
"""

from __future__ import annotations

import math
from typing import NoReturn

from tmm_cache.errors import RecordError
from tmm_cache.keys import JSON, canonical

_FOUND_MAX = 60


def reject(field: str, found: str, accepted: str) -> NoReturn:
    """Raise the `RecordError` that says what is wrong with a field."""
    raise RecordError(f"{field}: found {found}, accepted is {accepted}")


def shown(value: object) -> str:
    """A found value as a complaint quotes it: short, whatever a stranger's file holds."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list"
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python prints
        return "a huge integer"
    return text if len(text) <= _FOUND_MAX else text[:_FOUND_MAX] + "…"


class Fields:
    """The fields of one JSON object, read by name and type.

    Raises RecordError where the value is no object or its names are not exactly `names`: a
    missing field is a torn record, an unknown one a typing error or another program's.
    """

    __slots__ = ("_values", "_where")

    def __init__(self, value: object, where: str, names: tuple[str, ...]) -> None:
        if not isinstance(value, dict):
            reject(where or "record", shown(value), "an object")
        self._where = f"{where}." if where else ""
        self._values: dict[str, JSON] = value
        for name in names:
            if name not in value:
                reject(self._where + name, "nothing", "this field, always")
        for name in value:
            if name not in names:
                reject(f"{self._where}{shown(name)}", "this field", f"only {', '.join(names)}")

    def _reject(self, name: str, accepted: str) -> NoReturn:
        reject(self._where + name, shown(self._values[name]), accepted)

    def text(self, name: str) -> str:
        value = self._values[name]
        if not isinstance(value, str) or not value:
            self._reject(name, "a text that is not empty")
        return value

    def optional_text(self, name: str) -> str | None:
        return None if self._values[name] is None else self.text(name)

    def flag(self, name: str) -> bool:
        value = self._values[name]
        if not isinstance(value, bool):
            self._reject(name, "true or false")
        return value

    def count(self, name: str) -> int:
        value = self._values[name]
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            self._reject(name, "an integer >= 0")
        return value

    def measure(self, name: str) -> float:
        number = _measure(self._values[name])
        if number is None:
            self._reject(name, "a finite number >= 0")
        return number

    def optional_measure(self, name: str) -> float | None:
        return None if self._values[name] is None else self.measure(name)

    def measures(self, name: str) -> tuple[float, ...]:
        numbers = []
        for index, value in enumerate(self.items(name)):
            number = _measure(value)
            if number is None:
                reject(f"{self._where}{name}[{index}]", shown(value), "a finite number >= 0")
            numbers.append(number)
        return tuple(numbers)

    def items(self, name: str) -> list[JSON]:
        value = self._values[name]
        if not isinstance(value, list):
            self._reject(name, "a list")
        return value

    def mapping(self, name: str) -> dict[str, JSON]:
        value = self._values[name]
        if not isinstance(value, dict):
            self._reject(name, "an object")
        try:
            canonical(value)
        except (TypeError, ValueError, RecursionError) as error:
            raise RecordError(
                f"{self._where}{name}: found what is not JSON ({error}), accepted is an object"
            ) from error
        return value


def _measure(value: object) -> float | None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) and number >= 0 else None
