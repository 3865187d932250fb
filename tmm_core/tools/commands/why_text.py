"""Formats the analysis of :func:`tmm_core.tools.commands.why.take_apart` as text."""

from __future__ import annotations

from typing import Any

from tmm_base import console

from tmm_core.bench import report


def text(found: dict[str, Any], width: int) -> str:
    """A topic at a time, from the layout of the work to the effect of other configs, in lines of at
    most ``width`` columns."""
    layout = found["layout"]
    say: list[str] = []

    def topic(name: str, words: str) -> None:
        say.extend(console.paragraph(f"{name:11}{words}", width, hanging=11))

    topic("kernel", report.chosen(found))
    if found["note"]:
        topic("note", found["note"])
    topic(
        "tiles",
        f"{layout['tiles']} of {layout['block_m']}×{layout['block_n']}, {layout['steps']} steps of "
        f"{layout['block_k']} along K each; with room for {layout['at_once']} at once "
        f"{layout['waves']} wave{'s' * (layout['waves'] != 1)}, {layout['fill']:.0%} full",
    )
    if (reads := found["reads"]) is not None:
        topic(
            "reads",
            f"the first wave needs rows of A: {reads['rows']}, columns of B: {reads['columns']}; "
            f"L2 serves {reads['hits']:.0%} of {_mb(reads['l2_bytes'])}, "
            f"{_mb(reads['memory_bytes'])} come from memory",
        )
    _times(found, topic)
    if found["resources"] is None:
        topic("compiled", f"not here: {found['not_compiled']}")
    for used in found["resources"] or ():
        topic("compiled", f"{used['function']}: {_used(used)}")
    for change in found["changes"]:
        _changed(found, change, topic)
    return "\n".join(say)


def _times(found: dict[str, Any], topic: Any) -> None:
    parts = found["model_us"]
    if parts:
        listed = ", ".join(f"{name} {us:.3g}" for name, us in parts.items())
        longest = max((name for name in parts if name != "launch"), key=lambda name: parts[name])
        topic("model", f"µs of each alone: {listed}; {longest} takes longest")
    expected, measured = found["expected_us"], found["measured_us"]
    if expected is not None:
        compared = (
            f"; measured {measured:.4g}, {measured / expected:.2f} of that" if measured else ""
        )
        topic("time", f"expected {expected:.4g} µs{compared or '; not measured'}")
    elif measured:
        topic("time", f"measured {measured:.4g} µs")
    if time := measured or expected:
        rate = f"{found['flops'] / time / 1e6:.4g} TFLOPS, {found['bytes'] / time / 1e3:.4g} GB/s"
        topic("rate", f"{rate}, each operand and the result counted once")
    if measured and found["blas_us"]:
        ratio = found["blas_us"] / measured
        topic("blas", f"{found['blas_us']:.4g} µs: {ratio:.2f}× as long as this")


def _changed(found: dict[str, Any], change: dict[str, Any], topic: Any) -> None:
    fields = ", ".join(f"{name}={value}" for name, value in change["fields"].items())
    if "refused" in change:
        topic("with", f"{fields}: not possible: {change['refused']}")
        return
    words = []
    before, after = found["expected_us"], change["expected_us"]
    if before and after:
        words.append("no other time expected" if before == after else f"expected {after:.4g} µs")
    if change["measured_us"]:
        words.append(f"measured {change['measured_us']:.4g} µs")
    words += [_used(used) for used in change["resources"] or ()]
    topic("with", f"{fields}: {'; '.join(words) or 'nothing known'}")


def _used(used: dict[str, Any]) -> str:
    spilled = f"{used['stack']} bytes of stack" if used["stack"] else "no stack (nothing spilled)"
    blocks = f"{used['blocks']} block{'s' * (used['blocks'] != 1)}"
    return (
        f"{used['registers']} registers a thread, {spilled}, {used['shared_memory']} bytes of "
        f"shared memory, {used['num_warps']} warps; an SM holds {blocks} "
        f"(limit: {used['limited_by']}), occupancy {used['occupancy']:.0%}"
    )


def _mb(count: float) -> str:
    return f"{count / 1e6:.4g} MB"
