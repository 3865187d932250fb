"""``tmm explain``: what a call would run, why, and why not something else."""

from __future__ import annotations

import argparse

import torch
from tmm_cache import columns

import tmm_core
from tmm_core.spec.precision import precision
from tmm_core.tools.commands import options as shared
from tmm_core.tools.commands.console import DONE, UsageError, print_json


def run(options: argparse.Namespace) -> int:
    device = shared.device(options)
    [case] = shared.cases(options, [options.shape])
    with precision(case.tf32):
        try:
            # Only shapes, strides and dtypes are looked at.
            call = case.call(device, fill=torch.empty)
            explanation = tmm_core.explain(call.a, call.b, **call.keywords)
        except (RuntimeError, TypeError, ValueError) as error:
            raise UsageError(f"{case}: {error}") from error
    if options.json:
        print_json(explanation.to_json())
    else:
        print(explanation.text(columns.width()))
    return DONE
