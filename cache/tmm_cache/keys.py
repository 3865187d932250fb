"""Turns problems, environments and GPU names into file names.

Two processes must give the same problem the same name, for any order of its keys. No GPU name may
escape the cache's folder.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import TypeAlias

JSON: TypeAlias = "bool | int | float | str | Sequence[JSON] | Mapping[str, JSON] | None"
#: A JSON object: a problem, an environment or a config.
Document: TypeAlias = "Mapping[str, JSON]"

#: Digits of a digest. 64 bits: a collision needs about 10^9 problems, and `load` compares the
#: problem itself, so it would cost a miss, not a wrong kernel.
DIGEST_DIGITS = 16

_SLUG_MAX = 96
SLUG = rf"[a-z0-9][a-z0-9._-]{{0,{_SLUG_MAX - 1}}}"


def canonical(value: JSON) -> str:
    """Return the one JSON text of a value: sorted keys, no spaces, ASCII.

    Raises TypeError for a value that JSON cannot represent, ValueError for NaN, infinities and
    circular references, RecursionError for nesting beyond Python's stack.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False, default=_bare)


def plain(mapping: Document) -> dict[str, JSON]:
    """A copy made of dicts and lists only, in the mapping's order. Raises like `canonical`."""
    copy: dict[str, JSON] = json.loads(json.dumps(mapping, allow_nan=False, default=_bare))
    return copy


def _bare(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        return list(value)
    raise TypeError(f"{value!r} of type {type(value).__name__} is not JSON")


def digest(mapping: Document) -> str:
    """16 hexadecimal digits of the SHA-256 of the mapping's canonical JSON.

    Raises like `canonical`.
    """
    return hashlib.sha256(canonical(mapping).encode("ascii")).hexdigest()[:DIGEST_DIGITS]


def slug(text: str) -> str:
    """Return a folder name for a GPU: `slug("NVIDIA H200 sm90 132SM") == "nvidia-h200-sm90-132sm"`.

    Any text gives a valid name, and `slug` is idempotent. A text without a letter or digit gives
    "unknown"; an overlong one ends in a hash of the part that was cut.
    """
    name = re.sub(r"[^a-z0-9._]+", "-", text.lower()).lstrip("-._").rstrip("-")
    if len(name) > _SLUG_MAX:
        tail = hashlib.sha256(name.encode("ascii")).hexdigest()[:8]
        name = f"{name[: _SLUG_MAX - 9]}-{tail}"
    return name or "unknown"


def is_slug(name: str) -> bool:
    """Whether the name is valid for a GPU's folder: not empty, not `..`, no separator."""
    return re.fullmatch(SLUG, name) is not None
