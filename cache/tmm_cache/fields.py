"""Types of the fields of JSON files, which msgspec checks, and the limits of what is read.

A cache file may come from an untrusted archive, a full disk or an editor. Everything is bounded, so
that readers need not handle a size of 10**400 or a name of a megabyte.
"""

from __future__ import annotations

import functools
import math
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Final, TypeAlias, TypeGuard

import msgspec
from msgspec import Meta
from tmm_base.guards import reraise, suppress

from tmm_cache.cache_errors import RecordError
from tmm_cache.keys import canonical

#: Maximum characters that errors show of a found value, and of msgspec's text.
_FOUND_MAX, _TEXT_SHOWN = 60, 160

#: Upper bounds of values that are read. Real records hold names of 30 letters, reasons of up to
#: 500, and about 100 candidates with up to 100 samples and about ten parameters each.
NAME_MAX: Final = 256
A_NAME: Final = f"a printable text of 1 to {NAME_MAX} letters"
TEXT_MAX: Final = 4096
ITEMS_MAX: Final = 10_000
PARAMETERS_MAX: Final = 128
PROBLEM_MAX: Final = 64 * 2**10
#: A size in elements: 2**40 bf16 are two terabytes.
SIZE_MAX: Final = 2**40
INTEGER_MAX: Final = 2**63
_FLOAT_MAX: Final = sys.float_info.max

Name: TypeAlias = Annotated[str, Meta(min_length=1, max_length=NAME_MAX)]
Text: TypeAlias = Annotated[str, Meta(min_length=1, max_length=TEXT_MAX)]
Size: TypeAlias = Annotated[int, Meta(gt=0, lt=SIZE_MAX)]
Count: TypeAlias = Annotated[int, Meta(ge=0, le=INTEGER_MAX - 1)]
#: A finite number >= 0.
Measure: TypeAlias = Annotated[float, Meta(ge=0, le=_FLOAT_MAX)]
_Scalar: TypeAlias = (
    bool
    | Annotated[int, Meta(gt=-INTEGER_MAX, le=INTEGER_MAX - 1)]
    | Annotated[float, Meta(ge=-_FLOAT_MAX, le=_FLOAT_MAX)]
    | Annotated[str, Meta(max_length=NAME_MAX)]
    | None
)
_SCALARS: Final = {bool, int, float, str, type(None)}
#: An object of a few scalars, such as a kernel's config.
Parameters: TypeAlias = Annotated[Mapping[Name, _Scalar], Meta(max_length=PARAMETERS_MAX)]

_REFUSED: Final = (msgspec.MsgspecError, ValueError, RecursionError)
_HUGE = re.compile("[0-9]{100}")  # a digest in hexadecimal has 64 digits


class _Sizes(msgspec.Struct):
    """The fields of a problem that are not opaque: the search for neighbours reads them."""

    m: Size
    n: Size
    k: Size
    batch: Size


def parse(data: bytes) -> object:
    """The JSON value of a file's bytes. Raises ValueError, and nothing else, with the reason."""
    if not data.strip():
        raise ValueError("the file is empty")
    return decoded(data, Any)


def decoded(data: bytes, kind: Any) -> Any:
    """The JSON value of bytes, of the type ``kind``. Raises RecordError that names the field."""
    try:
        return _decoder(kind).decode(data)
    except _REFUSED as error:
        raise _refused(error) from error


# One decoder for each type: making one takes longer than decoding a few numbers.
_decoder = functools.cache(msgspec.json.Decoder)


def converted(value: object, kind: Any) -> Any:
    """Return a JSON value as one of the type ``kind``. Raises RecordError that names the field."""
    try:
        return msgspec.convert(value, kind, str_keys=True)
    except _REFUSED as error:
        raise _refused(error) from error


def require_unicode(value: object) -> None:
    """Check that no text has half of a surrogate pair, which no file can hold. Raises
    RecordError."""
    try:
        msgspec.json.encode(value)
    except UnicodeEncodeError as error:
        raise RecordError("found half of a surrogate pair, accepted is Unicode") from error
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        reraise(error)  # not JSON: a conversion names the field


def _refused(error: Exception) -> RecordError:
    """Return the error of a value that msgspec refuses, with its place and what was expected."""
    reraise(error)
    text, _, place = str(error).partition(" - at ")
    place = place.replace("`", "").replace("$.", "").replace("$", "")
    text = f"{place}: {text}" if place else text
    if not text.isprintable():  # the name of an unknown field
        text = text.encode("unicode_escape").decode("ascii")
    return RecordError(text if len(text) <= _TEXT_SHOWN else f"{text[:_TEXT_SHOWN]}…")


def shown(value: object) -> str:
    """Return a found value as quoted in an error, shortened."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list"
    with suppress(ValueError):  # an integer with more digits than Python prints
        text = repr(value)
        return text if len(text) <= _FOUND_MAX else text[:_FOUND_MAX] + "…"
    return "a huge integer"


def is_name(value: object) -> TypeGuard[str]:
    """Whether it is :data:`A_NAME`. A subclass of ``str`` may compare and print as it likes, and a
    control character forges lines of a report."""
    return type(value) is str and 0 < len(value) <= NAME_MAX and value.isprintable()


def require_printable(texts: Iterable[object]) -> None:
    """Check names and values: a terminal would execute control characters. Raises RecordError."""
    shown_texts = [*map(str, texts)]
    if not "".join(shown_texts).isprintable():
        found = next(text for text in shown_texts if not text.isprintable())
        raise RecordError(f"found {shown(found)}, accepted is a printable text")


def parameters(value: object) -> dict[str, Any]:
    """Return a kernel's config as an object of a few scalars, none of a plugin's own type. Raises
    RecordError."""
    for name, each in value.items() if isinstance(value, dict) else ():
        scalar = type(each) in _SCALARS and (type(each) is not float or math.isfinite(each))
        if type(name) is not str or not scalar:
            accepted = "None, a boolean, a finite number or a text, by name"
            raise RecordError(f"{shown(name)}: found {shown(each)}, accepted is {accepted}")
    found: dict[str, Any] = converted(value, Parameters)
    require_printable((*found, *found.values()))
    return found


def require_sizes(problem: Mapping[str, Any]) -> None:
    """Check the sizes of a problem. Raises RecordError."""
    try:
        converted(problem, _Sizes)
    except RecordError as error:
        raise RecordError(f"problem.{error}") from None


def require_problem(problem: Mapping[str, Any]) -> None:
    """Check a problem: opaque except for its sizes. Raises RecordError."""
    require_sizes(problem)
    try:
        text = canonical(problem)
    except (TypeError, ValueError, RecursionError) as error:
        raise RecordError(f"problem: found a value that is not JSON ({error})") from error
    if len(text) > PROBLEM_MAX or _HUGE.search(text):
        raise RecordError("problem: found a number or a text that is huge")
