"""Strict reading of JSON objects, with errors that name the field.

A cache file may come from an untrusted archive, a full disk or an editor. "KeyError: 'winner'"
helps nobody; "candidates[2].samples_us[0]: found -1.0, accepted is ..." does. Everything is
bounded, so that readers need not handle a size of 10**400 or a name of a megabyte.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Container, Iterator
from typing import Final, NoReturn, TypeGuard

from tmm_cache.errors import RecordError
from tmm_cache.keys import JSON, canonical

_FOUND_MAX = 60

#: Upper bounds of what is read. Real records hold names of 30 letters, reasons of up to 500, and
#: about 100 candidates with up to 100 samples and about ten parameters each.
NAME_MAX: Final = 256
TEXT_MAX: Final = 4096
ITEMS_MAX: Final = 10_000
PARAMETERS_MAX: Final = 128
PROBLEM_MAX: Final = 64 * 2**10
#: The sizes of a problem.
SIZES: Final = ("m", "n", "k", "batch")
#: A size in elements: 2**40 bf16 are two terabytes.
SIZE_MAX: Final = 2**40
INTEGER_MAX: Final = 2**63


def reject(field: str, found: str, accepted: str) -> NoReturn:
    """Raise the `RecordError` that says what is wrong with a field."""
    raise RecordError(f"{field}: found {found}, accepted is {accepted}")


def shown(value: object) -> str:
    """A found value as quoted in an error, shortened."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list"
    try:
        text = repr(value)
    except ValueError:  # an integer with more digits than Python prints
        return "a huge integer"
    return text if len(text) <= _FOUND_MAX else text[:_FOUND_MAX] + "…"


class Fields:
    """The fields of one JSON object, read by name and type.

    Raises RecordError if the value is not an object, a name in `required` is missing (a torn
    record), or a name is in neither `required` nor `optional` (a typo, or another program's file).
    """

    __slots__ = ("_values", "_where")

    def __init__(
        self, value: object, where: str, required: tuple[str, ...], optional: Container[str] = ()
    ) -> None:
        if not isinstance(value, dict):
            reject(where or "record", shown(value), "an object")
        self._where = f"{where}." if where else ""
        self._values: dict[str, JSON] = value
        for name in required:
            if name not in value:
                reject(self._where + name, "nothing", "this field, always")
        for name in value:
            if name not in required and name not in optional:
                reject(f"{self._where}{shown(name)}", "this field", "no field of that name")

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def _reject(self, name: str, accepted: str) -> NoReturn:
        reject(self._where + name, shown(self._values[name]), accepted)

    def text(self, name: str, longest: int = TEXT_MAX) -> str:
        value = self._values[name]
        if not isinstance(value, str) or not 0 < len(value) <= longest:
            self._reject(name, f"a text of 1 to {longest} letters")
        return value

    def name(self, name: str) -> str:
        value = self._values[name]
        if type(value) is str and 0 < len(value) <= NAME_MAX:
            return value
        return self.text(name, NAME_MAX)

    def optional_text(self, name: str) -> str | None:
        return None if self._values[name] is None else self.text(name)

    def flag(self, name: str) -> bool:
        value = self._values[name]
        if not isinstance(value, bool):
            self._reject(name, "true or false")
        return value

    def count(self, name: str) -> int:
        value = self._values[name]
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < INTEGER_MAX:
            self._reject(name, "an integer >= 0 and < 2**63")
        return value

    def measure(self, name: str) -> float:
        return _measure(self._values[name], self._where + name)

    def optional_measure(self, name: str) -> float | None:
        return None if self._values[name] is None else self.measure(name)

    def measures(self, name: str) -> tuple[float, ...]:
        values = self.items(name)
        if all(type(value) is float and 0 <= value < math.inf for value in values):
            return tuple(values)  # type: ignore[arg-type]  # checked above
        where = self._where + name
        return tuple(_measure(value, f"{where}[{index}]") for index, value in enumerate(values))

    def items(self, name: str) -> list[JSON]:
        value = self._values[name]
        if not isinstance(value, list) or len(value) > ITEMS_MAX:
            self._reject(name, f"a list of at most {ITEMS_MAX}")
        return value

    def _object(self, name: str) -> dict[str, JSON]:
        value = self._values[name]
        if not isinstance(value, dict):
            self._reject(name, "an object")
        return value

    def parameters(self, name: str) -> dict[str, JSON]:
        """An object of a few scalars, such as a kernel's config."""
        values = self._object(name)
        if len(values) > PARAMETERS_MAX:
            reject(self._where + name, f"{len(values)} fields", f"at most {PARAMETERS_MAX}")
        for key, value in values.items():
            if len(key) > NAME_MAX or not _is_scalar(value):
                where = f"{self._where}{name}.{shown(key)}"
                reject(where, shown(value), "null, a boolean, a number or a short text, finite")
        return values

    def times_by_size(self, name: str) -> dict[int, float]:
        """An object of times in µs by size; JSON spells the sizes as strings."""
        times: dict[int, float] = {}
        for key, value in self._object(name).items():
            where = f"{self._where}{name}.{shown(key)}"
            size = int(key) if _SIZE.fullmatch(key) else 0
            if not is_size(size) or len(times) == PARAMETERS_MAX:
                reject(where, "this size", f"at most {PARAMETERS_MAX} integers > 0 and < 2**40")
            times[size] = _measure(value, where)
        return times

    def problem(self, name: str) -> dict[str, JSON]:
        """A problem: opaque except for its sizes, which the search for neighbours reads."""
        value = self._object(name)
        for size in SIZES:
            if not is_size(value.get(size)):
                reject(f"{self._where}{name}.{size}", shown(value.get(size)), _A_SIZE)
        try:
            text = canonical(value)
        except (TypeError, ValueError, RecursionError) as error:
            raise RecordError(
                f"{self._where}{name}: found what is not JSON ({error}), accepted is an object"
            ) from error
        if len(text) > PROBLEM_MAX or _HUGE.search(text):
            reject(self._where + name, "a number or a text that is huge", "a problem")
        return value


def is_size(value: object) -> TypeGuard[int]:
    """Whether it is a number of elements: M, N, K or a batch."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < SIZE_MAX


_A_SIZE = "an integer > 0 and < 2**40"
_SIZE = re.compile("[1-9][0-9]{0,12}")
_HUGE = re.compile("[0-9]{100}")  # a digest in hexadecimal has 64 digits


def _is_scalar(value: object) -> bool:
    if type(value) is int:  # most values of a config
        return -INTEGER_MAX < value < INTEGER_MAX
    if isinstance(value, str):
        return len(value) <= NAME_MAX
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or (isinstance(value, int) and abs(value) < INTEGER_MAX)


def _measure(value: object, where: str) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):
            if 0 <= (number := float(value)) < math.inf:
                return number
    reject(where, shown(value), "a finite number >= 0")
