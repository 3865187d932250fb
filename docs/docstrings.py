"""Turns the docstrings' reStructuredText into Markdown for the API page: roles become plain code,
and doctests become blocks of Python."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:attr|class|exc|func|meth|mod):(?=`)")
_DOCTEST = re.compile(r"^( *)>>> .*(?:\n\1\S.*)*", re.MULTILINE)


class Markdown(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)


def markdown(docstring: str) -> str:
    """The docstring as Markdown."""
    text = re.sub(r" *# doctest:.*", "", _ROLE.sub("", docstring))
    text = _DOCTEST.sub(r"\1```pycon\n\g<0>\n\1```", text)
    return re.sub(r"::\n\n(?=    )", ":\n\n", text)
