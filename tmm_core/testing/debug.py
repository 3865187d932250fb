"""Print from or stop in selected programs of a kernel's grid.

    from tmm_core.testing import breakpoint_if, print_if

    @triton.jit
    def kernel(…):
        …
        print_if("acc", "0,>2", acc)      # where program_id(0) == 0 and program_id(1) > 2
        breakpoint_if("0,*,!=2")          # under TRITON_INTERPRET=1 only

A condition has up to three comma-separated terms, for ``program_id(0)``, ``(1)`` and ``(2)``. A
term is a number that the ID must equal, a comparison (``=3``, ``!=3``, ``<3``, ``<=3``, ``>3``,
``>=3``) or ``*`` for any ID. An axis without a term is unconstrained: ``""`` selects every program.
"""

from __future__ import annotations

import pdb
import sys
from types import FrameType

import triton
import triton.language as tl

from tmm_core.spec.device import interpreting


# No regular expression: Triton hashes everything that compile-time functions refer to, and
# rejects functions of other modules.
@triton.constexpr_function
def parse_condition(text):
    """Return the selected programs along each of the three axes. Each item has the first and the
    last ID of a range, and whether the IDs inside it are selected (True) or those outside.

    >>> parse_condition("0, !=1")
    ((0, 0, True), (1, 1, False), (0, 2147483647, True))

    Raises:
        ValueError: The text is not a condition; the message quotes the invalid term.
    """
    terms = text.split(",") if text.strip() else []
    if len(terms) > 3:
        raise ValueError(f"condition {text!r} has {len(terms)} terms; a grid has three axes")
    most = 2**31 - 1
    parsed = []
    for axis, term in enumerate(terms):
        number, comparison = term.strip(), "="
        for symbol in ("!=", "<=", ">=", "=", "<", ">"):
            if number.startswith(symbol):
                number, comparison = number[len(symbol) :].strip(), symbol
                break
        if term.strip() == "*":
            number, comparison = "0", ">="
        if not (number.isascii() and number.isdigit()):
            raise ValueError(
                f"condition {text!r}: {term!r}, for program_id({axis}), is none of 3, =3, !=3, "
                "<3, <=3, >3, >=3 and *"
            )
        value = int(number)
        ranges = {
            "=": (value, value, True),
            "!=": (value, value, False),
            "<": (0, value - 1, True),
            "<=": (0, value, True),
            ">": (value + 1, most, True),
            ">=": (value, most, True),
        }
        parsed.append(ranges[comparison])
    return (*parsed, *[(0, most, True)] * (3 - len(parsed)))


@triton.constexpr_function
def _part(text, axis, part):
    return parse_condition(text)[axis][part]


@triton.jit
def _holds_on(condition: tl.constexpr, AXIS: tl.constexpr):
    FIRST: tl.constexpr = _part(condition, AXIS, 0)
    LAST: tl.constexpr = _part(condition, AXIS, 1)
    WITHIN: tl.constexpr = _part(condition, AXIS, 2)
    pid = tl.program_id(AXIS)
    return ((pid >= FIRST) & (pid <= LAST)) == WITHIN


@triton.jit
def holds(condition: tl.constexpr):
    """Whether ``condition`` selects this program; a scalar."""
    return _holds_on(condition, 0) & _holds_on(condition, 1) & _holds_on(condition, 2)


@triton.jit
def _print(text: tl.constexpr, x):
    if x is not None:
        # The interpreter stores bf16 as 16-bit integers and would print those.
        if hasattr(x, "dtype") and x.dtype == tl.bfloat16:
            x = x.to(tl.float32)
        tl.device_print(text, x)


@triton.jit
def print_if(text: tl.constexpr, condition: tl.constexpr, x0, x1=None, x2=None, x3=None):
    """Print up to four scalars or blocks after ``text``, in the programs that ``condition``
    selects. The interpreter prints a block whole; compiled kernels print it element by element,
    through the GPU's buffer (see ``tl.device_print``).

    Raises:
        ValueError: The condition does not parse (wrapped in Triton's own error).
    """
    if holds(condition):
        _print(text, x0)
        _print(text, x1)
        _print(text, x2)
        _print(text, x3)


if interpreting():

    def breakpoint_if(condition):
        """Stop in Python's debugger at the next line of the kernel, in the programs that
        ``condition`` selects.

        Raises:
            ValueError: The condition does not parse (wrapped in Triton's own error).
        """
        if holds(condition):
            _stop(sys._getframe(1))

else:

    @triton.jit
    def breakpoint_if(condition: tl.constexpr):
        """Stop in Python's debugger; a compile error unless kernels are interpreted."""
        tl.static_assert(False, "breakpoint_if needs Triton's interpreter: set TRITON_INTERPRET=1")


def _stop(frame: FrameType) -> None:
    if sys.breakpointhook is sys.__breakpointhook__:
        # Not breakpoint(), which would stop here, two frames below the kernel.
        pdb.Pdb().set_trace(frame)
    else:
        sys.breakpointhook()
