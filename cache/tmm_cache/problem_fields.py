"""The fields that the command shows, read from problems opaque to the store.

Every function here tolerates missing fields. The core may add to a problem or rename a part of it,
and the command still lists the record.
"""

from __future__ import annotations

from collections.abc import Mapping

from tmm_base.guards import printable

from tmm_cache.keys import JSON, Document, canonical

ABSENT = "-"

#: Short names of dtypes.
SHORT_DTYPES = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
    "float64": "fp64",
    "float8_e4m3fn": "e4m3",
    "float8_e5m2": "e5m2",
}


def text_of(value: JSON) -> str:
    """Return a value as shown in a table cell."""
    if type(value) is int:  # most cells of a list; json.dumps takes fifteen times as long
        return str(value)
    if isinstance(value, str):
        return printable(value.removeprefix("torch.")) or "none"
    if value is None:
        return "none"
    return canonical(value)  # JSON has no control characters


def sizes(problem: Document) -> tuple[JSON, JSON, JSON]:
    """M, N and K; None for a missing one."""
    return problem.get("m"), problem.get("n"), problem.get("k")


def shape(problem: Document) -> str:
    """`4096x4096x1024`, with the prefix `8*` for a batch of eight, or the suffix `in 8 groups along
    m`."""
    text = "x".join([ABSENT if size is None else text_of(size) for size in sizes(problem)])
    batch, groups = problem.get("batch"), problem.get("groups")
    if isinstance(groups, Mapping):
        count, ragged = text_of(groups.get("count")), text_of(groups.get("ragged"))
        text = f"{text} in {count} groups along {ragged}"
    return text if batch in (None, 1) else f"{text_of(batch)}*{text}"


def operand(problem: Document, name: str, part: str) -> str:
    """Return a field, like "dtype" or "layout", of operand "a" or "b"."""
    value = problem.get(name)
    if isinstance(value, dict | Mapping) and part in value:  # the check for a dict is faster
        return text_of(value[part])
    return ABSENT


def dtypes(problem: Document, *, short: bool = False) -> str:
    """`bfloat16`, or `float8_e4m3fn x float8_e5m2 -> bfloat16` if they differ; short: `bf16` and
    `e4m3 x e5m2 -> bf16`."""
    a, b = operand(problem, "a", "dtype"), operand(problem, "b", "dtype")
    out = operand(problem, "out", "dtype")
    out = a if out == ABSENT else out
    if short:
        a, b, out = (SHORT_DTYPES.get(name, name) for name in (a, b, out))
    operands = a if b in (a, ABSENT) else f"{a} x {b}"
    return operands if out == a else f"{operands} -> {out}"


def layouts(problem: Document) -> str:
    """Return the layouts of a and b."""
    return f"{operand(problem, 'a', 'layout')} x {operand(problem, 'b', 'layout')}"


def epilogue(problem: Document) -> str:
    """Return the epilogue's name."""
    value = problem.get("epilogue", ABSENT)
    return text_of(value["name"] if isinstance(value, Mapping) and "name" in value else value)


def expression(problem: Document) -> str:
    """Return the epilogue with its bias and residual: `bias+silu+residual`."""
    middle = epilogue(problem)
    bias, residual = problem.get("bias"), problem.get("residual")
    named = [
        *(["bias"] if bias else []),
        *([] if middle == "identity" and (bias or residual) else [middle]),
        *(["residual"] if residual else []),
    ]
    return "+".join(named)


def config(values: Document) -> str:
    """`BLOCK_M=128 BLOCK_N=64`, without the fields whose value is an empty text: they are off."""
    return " ".join(
        [f"{printable(name)}={text_of(value)}" for name, value in values.items() if value != ""]
    )
