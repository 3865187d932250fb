"""The environment variables that the cache reads, and what each accepts.

Readers of a variable tolerate other values, since a typo must not cost a matmul; `tmm doctor`
reports them by these checks.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Final

from tmm_cache.cache_errors import UsageError
from tmm_cache.paths import absolute
from tmm_cache.size_limits import parse_age, parse_size

_YES: Final = ("1", "true", "yes", "on")
_NO: Final = ("", "0", "false", "no", "off")


def _folders(text: str) -> None:
    # Whether each can be read or written is a finding about the cache.
    for part in text.split(os.pathsep):
        if os.path.expanduser(part).startswith("~"):
            raise ValueError(f"{part} is in the home folder of an unknown user, and is not used")


def _one_of(*accepted: str) -> Callable[[str], None]:
    def check(text: str) -> None:
        if text not in accepted:
            named = " or ".join(repr(each) for each in accepted if each)
            raise ValueError(f"accepted is {named}")

    return check


def _switch(text: str) -> None:
    if text.lower() not in (*_YES, *_NO):
        raise ValueError("is taken for a yes; accepted is '1' or '0'")


def _lock_file(text: str) -> None:
    from tmm_cache.transport import Transport

    locked = os.environ.get("TMM_REQUIRE_LOCKED", "0").lower() not in _NO
    if text and (locked or absolute(text).exists()):
        try:
            Transport(absolute(text))
        except UsageError as error:
            raise ValueError(str(error).removeprefix(f"{absolute(text)}: ")) from error


#: A check for each variable: raises ValueError, with what is wrong or accepted.
CHECKS: Final[dict[str, Callable[[str], object]]] = {
    "TMM_CACHE_DIR": _folders,
    "TMM_CACHE_MAX_AGE": lambda text: text and parse_age(text),
    "TMM_CACHE_MAX_SIZE": lambda text: text and parse_size(text),
    "TMM_CACHE_PATH": _folders,
    "TMM_CACHE_SHARED": _one_of("1", "0", ""),
    "TMM_LOCK_FILE": _lock_file,
    "TMM_REQUIRE_LOCKED": _switch,
    "TMM_SHIPPED_RECORDS": _one_of("1", "0", ""),
}
