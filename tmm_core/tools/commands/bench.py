"""``tmm bench``: times the chosen kernels against the eager code they replace."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tmm_base import UsageError, console
from tmm_base.console import DONE, FOUND, INTERRUPTED, note, print_json, print_table

from tmm_core import dispatch
from tmm_core.bench import host, provenance, quick, report, runner, series, suites
from tmm_core.bench.results import Results, Writer, identity
from tmm_core.tools.commands import options as shared


def run(options: argparse.Namespace) -> int:
    if options.read is not None:
        results = _read(options.read)
        if not (results.runs or results.problems or results.host):
            raise UsageError(f"no results in {', '.join(map(str, options.read))}")
        return _show(results, options)
    if (options.sweep or options.config) and not options.kernel:
        raise UsageError("--sweep and --config apply to single kernels: name them with --kernel")
    started = time.monotonic()
    device = shared.device(options)
    if options.quick:
        options = _quick(options, on_gpu=device.type != "cpu")
    wanted, done = _tasks(options), _done(options)
    tasks = [task for task in wanted if identity(task.suite, task.case.to_json()) not in done]
    if options.resume:
        note(f"{len(wanted) - len(tasks)} of {len(wanted)} problems are measured already")
    names = list(dict.fromkeys(task.suite for task in tasks)) + ["host"] * options.host
    interrupted = False
    name = "-".join(names).replace(" ", "_") if len(names) < 5 else "all"
    writer = Writer(options.output, name)
    writer.append({"kind": "run", **provenance.describe(device, options.argv)})
    try:
        if options.host:
            writer.append(host.measure(device, tune=options.tune, budget=options.budget))
        chosen = _chosen(options, started + options.max_seconds)
        for number, document in enumerate(runner.run(tasks, device, chosen), 1):
            writer.append(document)
            line = f"[{number:{len(str(len(tasks)))}}/{len(tasks)}] {report.line(document)}"
            console.print_paragraph(line, hanging=6, file=sys.stderr)
    except KeyboardInterrupt:
        interrupted = True
    results = Results.of(writer.documents)
    measured = len(results.problems)
    if measured < len(tasks):
        why = "interrupted" if interrupted else f"--max-seconds {options.max_seconds:g} are over"
        note(f"{why}: {measured} of {len(tasks)} problems measured")
    if writer.path is not None:
        note(f"results in {writer.path}")
        results = _read([options.output])
    status = _show(results, options)
    return INTERRUPTED if interrupted else status


def _quick(options: argparse.Namespace, *, on_gpu: bool) -> argparse.Namespace:
    """The options of a run of two minutes; the user's own limits are kept."""
    if options.suite or options.shapes or options.squares or options.kernel or options.regret:
        raise UsageError("--quick chooses its problems: give no suite, shape, kernel or regret")
    if options.dtype:
        raise UsageError("--quick chooses its problems: give no --dtype")
    shared.refuse_unused(options)
    if not on_gpu:
        note(
            "no GPU: small problems on the CPU, where torch's own kernels serve every call; "
            "the ratios show what a call of tmm costs, not what it gains"
        )
    limits = {"budget": quick.BUDGET, "seconds": quick.TIMING if on_gpu else 0.02}
    unset = {name: value for name, value in limits.items() if getattr(options, name) is None}
    seconds = min(options.max_seconds, quick.SECONDS)
    return argparse.Namespace(**{**vars(options), **unset, "max_seconds": seconds})


def _chosen(options: argparse.Namespace, deadline: float) -> runner.Options:
    names = ("tune", "records", "budget", "kernels", "inductor", "clocks", "seconds")
    chosen = {name: getattr(options, name) for name in names}
    if options.seconds is None:
        del chosen["seconds"]
    return runner.Options(**chosen, series=tuple(_series(options)), deadline=deadline)


def _series(options: argparse.Namespace) -> list[series.Series]:
    registry = dispatch.default_dispatcher().registry
    kernels = [registry.kernel(name) for name in options.kernel]
    sweeps: dict[str, list[Any]] = {}
    for field, values in options.sweep:
        sweeps[field] = [*sweeps.get(field, []), *values]
    with shared.usage():
        return series.combined(kernels, options.config or {}, sweeps)


def _tasks(options: argparse.Namespace) -> list[suites.Task]:
    if options.quick:
        return quick.tasks(on_gpu=shared.device(options).type != "cpu")
    suite = suites.SWEEP if options.kernel else "shapes"
    shapes = [*options.shapes, *((1, size, size, size) for size in options.squares)]
    named = [suites.Task(suite, case) for case in shared.cases(options, shapes)]
    if options.kernel and not named:
        raise UsageError("--kernel: on which problems? give --shapes or --squares")
    named += suites.random_problems(options.regret, options.dtype or torch.bfloat16)
    usual = ["all"] if options.records else ["large"]
    names = options.suite or ([] if named or options.host else usual)
    with shared.usage():
        tasks = named + suites.select(names, dtype=options.dtype, limit=options.limit)
    if options.records:
        return tasks
    if not options.tune:
        raise UsageError("--no-records tunes every problem; --no-tune tunes none")
    return [replace(task, suite=task.suite + suites.UNRECORDED) for task in tasks]


def _done(options: argparse.Namespace) -> set[str]:
    """With ``--resume``, the identities of the measured problems in the output folder."""
    if not options.resume:
        return set()
    if options.output is None:
        raise UsageError("--resume needs --output, the folder with earlier results")
    before = _read([options.output]) if options.output.is_dir() else Results()
    measured = (each for each in before.problems if "failed" not in each)
    return {identity(each["suite"], each["case"]) for each in measured}


def _read(paths: Sequence[Path]) -> Results:
    with shared.usage("no results"):
        return Results.read(paths)


def _show(results: Results, options: argparse.Namespace) -> int:
    if options.json:
        print_json(vars(results))
    elif options.markdown:
        print(report.markdown(results), end="")
    elif options.quick:
        print_table(quick.COLUMNS, quick.gains(results), quick.COLUMNS[2:])
    else:
        _print_tables(results)
    if options.output is not None:
        options.output.mkdir(parents=True, exist_ok=True)
        written = options.output / "report.md"
        written.write_text(report.markdown(results), "utf-8")
        note(f"written: {written}")
    failed = any("failed" in document for document in results.problems)
    return FOUND if failed else DONE


#: Columns of single kernels that would not fit into a terminal.
_IN_REPORT = ("by capture", "A/A", "kernel", "origin", "error")


def _print_tables(results: Results) -> None:
    for section in report.sections(results):
        if section.rows and not section.detail:
            shown = [i for i, name in enumerate(section.columns) if name not in _IN_REPORT]
            rows = [[row[i] for i in shown] for row in section.rows]
            print_table([section.columns[i] for i in shown], rows, section.numbers)
    for document in results.measured:
        if document["suite"] == suites.SWEEP:
            for name, reason in document.get("not_timed", {}).items():
                note(f"{report.title(document)}: {name} was not timed: {reason}")
