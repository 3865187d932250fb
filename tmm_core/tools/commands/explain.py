"""``tmm explain``: shows which kernel a call would run, and why."""

from __future__ import annotations

import argparse
from dataclasses import replace

import torch
from tmm_base import UsageError, console
from tmm_base.console import DONE, print_json

from tmm_core import dispatch, settings
from tmm_core.bench.case import Case
from tmm_core.dispatch.explanation import Explanation, explain_problem
from tmm_core.spec.precision import precision
from tmm_core.tools.commands import gpus, why, why_text
from tmm_core.tools.commands import options as shared


def run(options: argparse.Namespace) -> int:
    [case] = shared.cases(options, [options.shape])
    explanation = _explanation(case, options)
    if options.why:
        found = why.take_apart(explanation, dispatch.default_dispatcher().registry)
        if options.json:
            print_json(found)
        else:
            console.print_paragraph(f"problem    {explanation.problem}", hanging=11)
            print(f"gpu        {explanation.problem.device.name}")
            print(why_text.text(found, console.width()))
    elif options.json:
        print_json(explanation.to_json())
    else:
        print(explanation.text(console.width()))
    return DONE


def _explanation(case: Case, options: argparse.Namespace) -> Explanation:
    dispatcher = dispatch.default_dispatcher()
    gpu = None if options.gpu is None else gpus.find(dispatcher.store, options.gpu)
    device = torch.device("cpu") if gpu is not None else shared.device(options)
    if options.config is not None and options.kernel is None:
        raise UsageError("--config belongs to one kernel: name it with --kernel")
    with (
        precision(case.tf32),
        settings.override(kernel=options.kernel, config=options.config) as current,
        shared.usage(str(case), RuntimeError, TypeError),
    ):
        problem = case.problem(device)
        if gpu is not None:
            problem = replace(problem, device=gpu)
        return explain_problem(dispatcher, problem, current)
