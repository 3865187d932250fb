"""``tmm explain``: shows which kernel a call would run, and why."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tmm_cache import console
from tmm_cache.console import DONE, UsageError, note, print_json
from tmm_cache.disk import require_target

from tmm_core import dispatch, settings
from tmm_core.bench import candidates, tiles
from tmm_core.bench.case import Case
from tmm_core.dispatch.explanation import Explanation, explain_problem
from tmm_core.errors import reraise
from tmm_core.spec.precision import precision
from tmm_core.tools.commands import gpus, ncu, why, why_text
from tmm_core.tools.commands import options as shared


def run(options: argparse.Namespace) -> int:
    if options.plot is not None:
        require_target(options.plot)
    if options.shape is None:
        if not options.tiles:
            raise UsageError("give a shape MxNxK, or --tiles RxC")
        return _show_tiles(_plain_grid(options), options, f"{options.tiles} tiles")
    [case] = shared.cases(options, [options.shape])
    explanation = _explanation(case, options)
    if options.tiles is not None:
        return _show_tiles(_grid(explanation, options), options, str(explanation.problem))
    if options.ncu:
        return _print_ncu(case, explanation)
    if options.why:
        found = why.take_apart(explanation, dispatch.default_dispatcher().registry)
        if options.json:
            print_json(found)
        else:
            print(f"problem    {explanation.problem}\ngpu        {explanation.problem.device.name}")
            print(why_text.text(found))
    elif options.json:
        print_json(explanation.to_json())
    else:
        print(explanation.text(console.width()))
    if options.plot is not None:
        _plot(explanation, options.plot)
    return DONE


def _explanation(case: Case, options: argparse.Namespace) -> Explanation:
    dispatcher = dispatch.default_dispatcher()
    gpu = None if options.gpu is None else gpus.find(dispatcher.store, options.gpu)
    device = torch.device("cpu") if gpu is not None else shared.device(options)
    forced: dict[str, Any] = {}
    if options.kernel is not None:
        forced["kernel"] = options.kernel
    if options.config is not None and options.tiles is None:
        if options.kernel is None:
            raise UsageError("--config belongs to one kernel: name it with --kernel")
        forced["config"] = options.config
    with (
        precision(case.tf32),
        settings.override(**forced) as current,
        shared.usage(str(case), RuntimeError, TypeError),
    ):
        problem = case.problem(device)
        if gpu is not None:
            problem = replace(problem, device=gpu)
        return explain_problem(dispatcher, problem, current)


# -- tiles -------------------------------------------------------------------------------


def _plain_grid(options: argparse.Namespace) -> tuple[tiles.Grid, list[int]]:
    """A grid of tiles without sizes; the number along K and per wave is that along the longer of
    the other two dimensions."""
    rows, columns = options.tiles
    longer = max(rows, columns)
    wave = options.wave or longer
    return tiles.Grid(rows, columns, longer, wave), options.group or [1]


def _grid(explanation: Explanation, options: argparse.Namespace) -> tuple[tiles.Grid, list[int]]:
    """The grid of the chosen kernel, or of the blocks given by ``--config``."""
    if options.tiles:
        raise UsageError("--tiles takes RxC without a shape, and nothing with one")
    problem, config = explanation.problem, options.config or {}
    if "BLOCK_M" in config and "BLOCK_N" in config:
        wave = options.wave or problem.device.sm_count
        if not wave:
            raise UsageError("the number of tiles per wave is unknown: give --wave or --gpu NAME")
        grid = _of_blocks(explanation, config, wave)
        group = config.get("GROUP_M", 1)
    else:
        if config:
            raise UsageError("--tiles: give BLOCK_M and BLOCK_N in --config, or no --config")
        candidate, anatomy, reason = why.told(explanation, dispatch.default_dispatcher().registry)
        note(f"{candidate}{f' ({reason})' if reason else ''}")
        grid, group = why.grid_of(problem, anatomy), anatomy.group_m or 1
        grid = replace(grid, wave=options.wave or grid.wave)
    return grid, options.group or [group]


def _of_blocks(explanation: Explanation, config: Mapping[str, Any], wave: int) -> tiles.Grid:
    problem = explanation.problem
    m, n, k = config["BLOCK_M"], config["BLOCK_N"], config.get("BLOCK_K", 64)
    if not all(isinstance(block, int) and block > 0 for block in (m, n, k)):
        raise UsageError(f"--config: blocks are whole numbers above 0, not {m}, {n}, {k}")
    return tiles.Grid.of(problem, (m, n), -(-problem.k // k), wave)


def _show_tiles(
    drawn: tuple[tiles.Grid, list[int]], options: argparse.Namespace, title: str
) -> int:
    grid, groups = drawn
    if grid.rows * grid.columns > _MOST_TILES:
        raise UsageError(f"{grid.rows}×{grid.columns} tiles are more than {_MOST_TILES}")
    if options.json:
        print_json(tiles.to_json(grid, groups))
    else:
        print(tiles.text(grid, groups, colour=sys.stdout.isatty()))
    if options.plot is not None:
        _drawn(options.plot, lambda path: tiles.draw(grid, groups, path, title))
    return DONE


#: A picture of more tiles is unreadable.
_MOST_TILES = 100_000


# -- pictures, and a profiler's command ---------------------------------------------------


def _plot(explanation: Explanation, path: Path) -> None:
    record, problem = explanation.record, explanation.problem
    if record is None:
        raise UsageError(f"--plot draws a record, and {problem} has none; run tmm tune")
    registry = dispatch.default_dispatcher().registry
    expected = []
    for result in record.candidates:
        try:
            kernel = registry.kernel(result.kernel)
            config = kernel.config_type.from_json(result.config)
            expected.append(kernel.estimate_us(explanation.measured or problem, config))
        except Exception as error:  # the kernel is not installed, or has changed: no estimate
            reraise(error)
            expected.append(None)
    chosen = explanation.choice.candidate
    mark = chosen.kernel.name, chosen.config.to_json()
    title = f"{explanation.measured or problem} on {problem.device.name}, {record.created[:10]}"
    _drawn(path, lambda path: candidates.draw(record, path, title, mark, expected))


def _drawn(path: Path, draw: Any) -> None:
    with shared.usage(f"--plot {path}", ModuleNotFoundError, OSError):
        draw(path)
    note(f"written: {path}")


def _print_ncu(case: Case, explanation: Explanation) -> int:
    candidate = explanation.choice.candidate
    anatomy = candidate.kernel.anatomy(explanation.problem, candidate.config)
    print(ncu.line(case, candidate, anatomy.functions if anatomy is not None else ()))
    return DONE
