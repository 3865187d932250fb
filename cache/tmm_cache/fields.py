"""Reads JSON objects strictly, with errors that name the field.

A cache file may come from an untrusted archive, a full disk or an editor. "KeyError: 'winner'"
helps nobody; "candidates[2].samples_us[0]: found -1.0, accepted is ..." does. Everything is
bounded, so that readers need not handle a size of 10**400 or a name of a megabyte.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Container, Mapping
from typing import Any, Final, TypeAlias, TypeGuard

from tmm_cache.cache_errors import RecordError, reraise, suppress
from tmm_cache.keys import JSON, canonical

#: Converts a JSON value to the field's value, or raises `RefusedError`.
Reader: TypeAlias = Callable[[Any], Any]

_FOUND_MAX = 60

#: Upper bounds of values that are read. Real records hold names of 30 letters, reasons of up to
#: 500, and about 100 candidates with up to 100 samples and about ten parameters each.
NAME_MAX: Final = 256
A_NAME: Final = f"a printable text of 1 to {NAME_MAX} letters"
TEXT_MAX: Final = 4096
ITEMS_MAX: Final = 10_000
PARAMETERS_MAX: Final = 128
PROBLEM_MAX: Final = 64 * 2**10
#: The sizes of a problem.
SIZES: Final = ("m", "n", "k", "batch")
#: A size in elements: 2**40 bf16 are two terabytes.
SIZE_MAX: Final = 2**40
INTEGER_MAX: Final = 2**63


class RefusedError(RecordError):
    """A value that is refused: its value, the accepted values, and its place in the document."""

    def __init__(self, found: str, accepted: str, place: str = "") -> None:
        super().__init__(found, accepted, place)

    def __str__(self) -> str:
        found, accepted, place = self.args
        return f"{place.removeprefix('.') or 'record'}: found {found}, accepted is {accepted}"


def parse(data: bytes) -> object:
    """The JSON value of a file's bytes. Raises ValueError, and nothing else, with the reason."""
    if not data.strip():
        raise ValueError("the file is empty")
    try:
        value: object = json.loads(
            data.decode("utf-8"), parse_float=_finite, parse_constant=_finite
        )
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    return value


def _finite(text: str) -> float:
    if math.isfinite(number := float(text)):
        return number
    raise ValueError(f"{text[:_FOUND_MAX]} is not JSON")


def shown(value: object) -> str:
    """A found value as quoted in an error, shortened."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list"
    try:
        text = repr(value)
    except ValueError as error:  # an integer with more digits than Python prints
        reraise(error)
        return "a huge integer"
    return text if len(text) <= _FOUND_MAX else text[:_FOUND_MAX] + "…"


def kind(accepted: str, accepts: Callable[[Any], bool]) -> Reader:
    """The reader of the values for which `accepts` returns true."""

    def read(value: object) -> object:
        if not accepts(value):
            raise RefusedError(shown(value), accepted)
        return value

    return read


def is_name(value: object) -> TypeGuard[str]:
    """Whether it is :data:`A_NAME`. A subclass of ``str`` may compare and print as it likes, and a
    control character forges lines of a report."""
    return type(value) is str and 0 < len(value) <= NAME_MAX and value.isprintable()


def at(place: str, read: Reader, value: object) -> Any:
    """The value that `read` reads, at `place` in an object (`.name`) or a list (`[0]`)."""
    try:
        return read(value)
    except RefusedError as error:
        found, accepted, inner = error.args
        raise RefusedError(found, accepted, place + inner) from None


def is_size(value: object) -> TypeGuard[int]:
    """Whether it is a number of elements: M, N, K or a batch."""
    return type(value) is int and 0 < value < SIZE_MAX


def _is_scalar(value: object) -> bool:
    if type(value) is int:  # most values of a config
        return -INTEGER_MAX < value < INTEGER_MAX
    if type(value) is str:
        return len(value) <= NAME_MAX and value.isprintable()
    if type(value) is float:
        return math.isfinite(value)
    return value is None or type(value) is bool


text = kind(
    f"a text of 1 to {TEXT_MAX} letters", lambda v: type(v) is str and 0 < len(v) <= TEXT_MAX
)
name = kind(A_NAME, is_name)
flag = kind("true or false", lambda value: isinstance(value, bool))
count = kind("an integer >= 0 and < 2**63", lambda v: type(v) is int and 0 <= v < INTEGER_MAX)
_size = kind("an integer > 0 and < 2**40", is_size)
_object = kind("an object", lambda value: isinstance(value, dict))
_list = kind(
    f"a list of at most {ITEMS_MAX}", lambda v: isinstance(v, list) and len(v) <= ITEMS_MAX
)
_SIZE = re.compile("[1-9][0-9]{0,12}")
_HUGE = re.compile("[0-9]{100}")  # a digest in hexadecimal has 64 digits


def fields(
    value: object, readers: Mapping[str, Reader], optional: Container[str]
) -> dict[str, Any]:
    """The fields of a JSON object, each as its reader returns it.

    Raises RefusedError if the value is not an object, a name is missing and not in `optional` (a
    torn record), or a name has no reader (a typo, or another program's file).
    """
    values: dict[str, JSON] = _object(value)
    for name in readers:
        if name not in values and name not in optional:
            raise RefusedError("nothing", "this field, always", f".{name}")
    for name in values:
        if name not in readers:
            raise RefusedError("this field", "no field of that name", f".{shown(name)}")
    return {name: at(f".{name}", readers[name], each) for name, each in values.items()}


def items(read: Reader) -> Reader:
    """The reader of a list whose items `read` reads."""
    return lambda value: tuple(
        at(f"[{index}]", read, each) for index, each in enumerate(_list(value))
    )


def optional(read: Reader) -> Reader:
    """The reader of null, or of what `read` reads."""
    return lambda value: None if value is None else read(value)


def measure(value: object) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        with suppress(OverflowError):
            if 0 <= (number := float(value)) < math.inf:
                return number
    raise RefusedError(shown(value), "a finite number >= 0")


def measures(value: object) -> tuple[float, ...]:
    values = _list(value)
    if all(type(each) is float and 0 <= each < math.inf for each in values):
        return tuple(values)  # most samples; three times as fast as below
    found: tuple[float, ...] = items(measure)(values)
    return found


def parameters(value: object) -> dict[str, JSON]:
    """An object of a few scalars, such as a kernel's config."""
    values: dict[str, JSON] = _object(value)
    if len(values) > PARAMETERS_MAX:
        raise RefusedError(f"{len(values)} fields", f"at most {PARAMETERS_MAX}")
    for key, each in values.items():
        if not is_name(key) or not _is_scalar(each):
            accepted = "null, a boolean, a finite number or a short printable text, by name"
            raise RefusedError(shown(each), accepted, f".{shown(key)}")
    return values


def times_by_size(value: object) -> dict[int, float]:
    """An object of times in µs by size; JSON spells the sizes as strings."""
    times: dict[int, float] = {}
    for key, each in _object(value).items():
        size = int(key) if _SIZE.fullmatch(key) else 0
        if not is_size(size) or len(times) == PARAMETERS_MAX:
            accepted = f"at most {PARAMETERS_MAX} integers > 0 and < 2**40"
            raise RefusedError("this size", accepted, f".{shown(key)}")
        times[size] = at(f".{shown(key)}", measure, each)
    return times


def problem(value: object) -> dict[str, JSON]:
    """A problem: opaque except for its sizes, which the search for neighbours reads."""
    values: dict[str, JSON] = _object(value)
    for size in SIZES:
        at(f".{size}", _size, values.get(size))
    try:
        text = canonical(values)
    except (TypeError, ValueError, RecursionError) as error:
        raise RefusedError(f"a value that is not JSON ({error})", "an object") from error
    if len(text) > PROBLEM_MAX or _HUGE.search(text):
        raise RefusedError("a number or a text that is huge", "a problem")
    return values
