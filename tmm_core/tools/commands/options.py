"""Options shared by several subcommands."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar, get_args

import torch
from tmm_base import UsageError
from tmm_base.console import argument

from tmm_core.bench.case import LAYOUTS, SCALES, Case, parse_dtype, parse_expression
from tmm_core.formats import IMPLIED
from tmm_core.spec.groups import Ragged

T = TypeVar("T")


@contextmanager
def usage(what: str = "", *kinds: type[Exception]) -> Iterator[None]:
    """A context that turns some errors into a UsageError about ``what``, an option or a file. They
    are ValueError, JSON that is nested too deeply, and these ``kinds``."""
    mistakes: tuple[type[Exception], ...] = (ValueError, RecursionError, *kinds)
    try:
        yield
    except mistakes as error:
        text = next(iter(str(error).splitlines()), "")  # torch adds the frames of its C++ code
        raise UsageError(f"{what}{': ' if what else ''}{text}") from error


def add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device", help="torch device; default: the current GPU, or the CPU if there is none"
    )


def add_problem(parser: argparse.ArgumentParser) -> None:
    """Add the options that describe a problem, except its sizes."""
    group = parser.add_argument_group("the problem")
    group.add_argument(
        "--dtype",
        type=argument(parse_dtype),
        help="bf16 (default), fp16, fp32, e4m3, e5m2 or torch's name",
    )
    group.add_argument(
        "--layout",
        choices=LAYOUTS,
        help="layout of a and b: n row-major, t transposed; nt is x @ weight.T (default: nn)",
    )
    group.add_argument(
        "--epilogue",
        type=argument(parse_expression),
        default=parse_expression(""),
        metavar="TEXT",
        help='as in matmul, like silu or "gelu_tanh+softcap(30)"; bias+…+residual adds those',
    )
    text = "the result's dtype (default: the operands')"
    group.add_argument("--out-dtype", type=argument(parse_dtype), metavar="DTYPE", help=text)
    group.add_argument(
        "--scales",
        choices=SCALES[1:],
        help="scales of e4m3 and e5m2 operands: one number each, or one for each row of a and "
        "column of b (default: none)",
    )
    group.add_argument("--tf32", action="store_true", help="fp32 may be rounded to TF32")
    group.add_argument(
        "--groups",
        type=count,
        default=0,
        metavar="G",
        help="a grouped product; its sizes are those of all groups together",
    )
    group.add_argument(
        "--ragged",
        choices=get_args(Ragged),
        help="the dimension along which the sizes of groups differ (default: m)",
    )


def cases(options: argparse.Namespace, shapes: list[tuple[int, int, int, int]]) -> list[Case]:
    """The cases with these ``shapes`` and the other options.

    Raises:
        UsageError: Options that contradict each other.
    """
    if options.scales and shapes and options.dtype not in IMPLIED:
        raise UsageError(f"--scales {options.scales} needs --dtype e4m3 or e5m2")
    if options.ragged and not options.groups:
        raise UsageError(f"--ragged {options.ragged} needs --groups")
    if not shapes:
        refuse_unused(options)
    names = ("dtype", "layout", "out_dtype", "tf32", "scales", "groups", "ragged")
    fields = {name: value for name in names if (value := getattr(options, name)) is not None}
    found = []
    for batch, m, n, k in shapes:
        if options.groups and batch > 1:
            raise UsageError("--groups takes no batch")
        found.append(Case(m=m, n=n, k=k, batch=batch, **options.epilogue, **fields))
    return found


def refuse_unused(options: argparse.Namespace) -> None:
    """Refuse the options that describe a problem where no shape is given: other problems have
    their own. ``--dtype`` is not among them, since it selects problems of suites.

    Raises:
        UsageError: One of them is given.
    """
    names = ("layout", "out_dtype", "scales", "tf32", "groups", "ragged")
    given = [name for name in names if getattr(options, name)]
    if any(options.epilogue.values()):
        given.append("epilogue")
    if given:
        text = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise UsageError(f"{text}: on which problems? give shapes, like 4096x4096x512")


def device(options: argparse.Namespace) -> torch.device:
    """The torch device to work on, with its index.

    Raises:
        UsageError: It does not exist.
    """
    has_gpu = torch.cuda.is_available()
    text = options.device or ("cuda" if has_gpu else "cpu")
    with usage(f"--device {text}", RuntimeError):
        chosen = torch.device(text)
    if chosen.type not in ("cpu", "cuda"):
        raise UsageError(f"--device {text}: kernels run on cpu and cuda")
    if chosen.type == "cuda":
        if not has_gpu:
            raise UsageError(
                f"--device {text}: torch {torch.__version__} sees no GPU; try tmm doctor"
            )
        index = torch.cuda.current_device() if chosen.index is None else chosen.index
        if index >= torch.cuda.device_count():
            raise UsageError(f"--device {text}: there are {torch.cuda.device_count()} GPUs")
        chosen = torch.device("cuda", index)
        # The tuner measures on the current device, because a fingerprint has no index.
        torch.cuda.set_device(chosen)
    return chosen


def field(text: str) -> tuple[str, int | float | bool | str]:
    """Name and value of one field of a config.

    >>> field("GROUP_M=8"), field("FLATTEN=True"), field("schedule=pingpong")
    (('GROUP_M', 8), ('FLATTEN', True), ('schedule', 'pingpong'))

    Raises:
        ValueError: The name or the value is missing.
    """
    name, equals, value = (part.strip() for part in text.partition("="))
    if not (name and equals):
        raise ValueError(f"found {text!r}, accepted is FIELD=VALUE, like GROUP_M=8")
    return name, value_of(value)


def value_of(text: str) -> int | float | bool | str:
    """The number or Boolean that ``text`` spells, else the text."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def positive(kind: Callable[[str], T], text: str) -> T:
    """``kind(text)``, which must be positive.

    Raises:
        ValueError: It is not positive, or no such number.
    """
    value: Any = None
    with suppress(ValueError):
        value = kind(text)
    if value is None or not 0 < value < float("inf"):
        whole = "whole " if kind is int else ""
        raise ValueError(f"found {text}, accepted is a {whole}number above 0")
    return value  # type: ignore[no-any-return]


@argument
def count(text: str) -> int:
    """A positive whole number."""
    return positive(int, text)
