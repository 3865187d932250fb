"""The arguments of a launch of ``triton.warp_specialized``. Each property of a problem adds its
own."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tmm_core import Problem
from tmm_core.triton import Described, device_function, pointer, port_function
from tmm_triton import scaled_step
from tmm_triton.hopper.config import Constants, WarpSpecializedConfig
from tmm_triton.hopper.operand_layout import ALIGNMENT, boxed, described, residual_by_tma
from tmm_triton.hopper.tile_shapes import tail_tiles
from tmm_triton.operands import Typed, Zeros, parts
from tmm_triton.ragged_tiles import kinds

#: Gluon's names of the dtypes of operands, outputs, bias and residual.
_GLUON = {
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
    torch.float32: gl.float32,
    torch.float8_e4m3fn: gl.float8e4nv,
    torch.float8_e5m2: gl.float8e5,
}

#: The arguments of auxiliary outputs, and of their functions.
_PORTS, _FUNCTIONS = ("port_ptr", "port_2_ptr"), ("OF", "OF_2")


@dataclass
class KernelArguments:
    """The arguments of the kernel that computes the product.

    Attributes:
        problem: The product that the kernel computes.
        config: Its tile, and how the block's warps share it.
        c: The properties of problem and config that the kernel is compiled for.
        arguments: The types and the values of run-time arguments, by name.
        constants: The values of compile-time arguments.
        divisible: Run-time arguments that are multiples of a number.
    """

    problem: Problem
    config: WarpSpecializedConfig
    c: Constants
    arguments: Typed = field(default_factory=dict)
    constants: dict[str, Any] = field(default_factory=dict)
    divisible: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(
        cls, problem: Problem, config: WarpSpecializedConfig, blocks: int, port_at: int
    ) -> KernelArguments:
        """Return the arguments of a launch of ``blocks`` blocks. Reduced rows begin at the element
        ``port_at`` of the workspace."""
        made = cls(problem, config, Constants.of(problem, config))
        made._add_operands()
        made._add_groups()
        made._add_parts(blocks)
        made._add_constants()
        made._add_outputs(port_at)
        made._add_result()
        made._add_bias()
        made._add_residual()
        made._add_factors()
        made._promise_wide_stores()
        return made

    def _described(self, name: str, rows: int, columns: int) -> tuple[str, Described]:
        """Return a tensor that TMA accesses in boxes."""
        operand = getattr(self.problem, name)
        kind = kinds(self.c.RAGGED, self.c.BATCHED)[name]
        block = boxed(rows, columns, operand.layout != "row", kind)
        layout = gl.NVMMASharedLayout.get_default_for(block, _GLUON[operand.dtype])
        make = functools.partial(TensorDescriptor, layout=layout)
        return described(name, operand, rows, columns, kind, make, f",{layout!r}")

    def _outer(self, name: str) -> tuple[str, int]:
        """The stride between an operand's rows, or between its columns if these are contiguous."""
        return name, -1 if getattr(self.problem, name).layout == "col" else -2

    def _add_operands(self) -> None:
        problem, config, c = self.problem, self.config, self.c
        self.arguments |= {
            "a_desc": self._described("a", c.A_ROWS, config.BLOCK_K),
            "b_desc": self._described("b", config.BLOCK_K, c.box_columns),
            "M": ("i32", problem.m),
            "N": ("i32", problem.n),
            "K": ("i32", problem.k),
            # Not a constant: tuning it compiles nothing.
            "GROUP_M": ("i32", config.GROUP_M),
        }
        if problem.batch > 1:
            self.arguments |= {"BATCH": ("i32", problem.batch)}
            self.arguments |= {"a_stride_z": ("i64", ("a", 0)), "b_stride_z": ("i64", ("b", 0))}
        if c.WORDS is not None:
            del self.arguments[f"{c.WORDS}_desc"]
            self.arguments |= {"words_ptr": (pointer(problem.a.dtype), c.WORDS)}
            self.arguments |= {"words_stride": ("i64", self._outer(c.WORDS))}
        if config.early == "l2":
            self.arguments |= {"ahead_ptr": (pointer(problem.b.dtype), "b")}
            self.arguments |= {"ahead_stride": ("i64", self._outer("b"))}

    def _add_groups(self) -> None:
        if (groups := self.problem.groups) is None:
            return
        self.arguments |= {"offs_ptr": ("*i32", "offs"), "G": ("i32", groups.count)}
        if groups.ragged == "m":
            self.arguments |= {"table_ptr": ("*i32", "workspace"), "b_stride_z": ("i64", ("b", 0))}
        for name in ("out_index", "out_weights"):
            if dtype := groups.extras[name]:
                self.arguments[f"{name}_ptr"] = (pointer(dtype), name)

    def _add_parts(self, blocks: int) -> None:
        """The workspace and the flags of tiles whose sums several blocks compute."""
        if self.config.tail_splits > 1:
            self.arguments |= {
                "parts_ptr": ("*fp32", "workspace"),
                "flags_ptr": ("*i32", Zeros(blocks * self.c.a_boxes)),
                "TAIL": ("i32", tail_tiles(self.problem, self.config)),
            }

    def _add_constants(self) -> None:
        epilogue = self.problem.epilogue
        self.constants |= {
            "EPILOGUE": device_function(epilogue),
            **dict.fromkeys(_FUNCTIONS),
            **dict(zip(_FUNCTIONS, map(port_function, epilogue.outputs), strict=False)),
            "C": self.c,
        }

    def _add_outputs(self, port_at: int) -> None:
        """The epilogue's auxiliary outputs."""
        problem, c = self.problem, self.c
        outputs = problem.epilogue.outputs
        for i, port in enumerate(outputs if c.GROUP else ()):
            self.arguments[_PORTS[i]] = pointer(port.dtype), f"output_{i}"
        if c.REDUCE is not None:
            self.arguments |= {"port_ptr": ("*fp32", "workspace"), "port_at": ("i64", port_at)}
            self.arguments |= {"port_stride": ("i64", problem.m)}
        if c.GROUP and problem.n % ALIGNMENT == 0:
            # 16 values of 8 bits are stored at once.
            self.divisible |= dict.fromkeys(("N", *_PORTS[: len(outputs)]), ALIGNMENT)

    def _add_result(self) -> None:
        problem, config, c = self.problem, self.config, self.c
        if c.POINTERS or c.ZEROED:
            stride = "i64" if problem.out.wide or problem.m == 1 else "i32"
            self.arguments |= {"out_ptr": (pointer(problem.out.dtype), "out")}
            self.arguments |= {"out_stride": (stride, ("out", -2))}
        if c.POINTERS and c.stacked:
            self.arguments["out_stride_z"] = ("i64", ("out", 0))
        if not c.POINTERS:
            type_of, out = self._described("out", *self._strip)
            describe, columns = out.describe, problem.n
            if config.splits > 1:  # parts of all tiles, one below the other
                out = Described("workspace", lambda t: describe(t.view(-1, columns)))
            self.arguments["c_desc"] = (type_of, out)

    @property
    def _strip(self) -> tuple[int, int]:
        """Rows and columns that are stored at once."""
        return self.config.rows, self.config.BLOCK_N // self.config.subtiles

    def _add_bias(self) -> None:
        if (dtype := self.problem.bias) is None:
            return
        self.arguments |= {"bias_ptr": (pointer(dtype), "bias")}
        self.arguments |= {"bias_stride": ("i64", ("bias", -1))}
        if self.problem.groups is not None:
            self.arguments |= {"bias_stride_z": ("i64", ("bias", 0))}

    def _add_residual(self) -> None:
        problem, c = self.problem, self.c
        if problem.residual is None:
            return
        if c.stacked:
            self.arguments["residual_stride_z"] = ("i64", ("residual", 0))
        if residual_by_tma(problem):
            self.arguments["r_desc"] = self._described("residual", *self._strip)
            return
        # A dimension of one element may have any stride.
        wide = problem.residual.wide or 1 in (problem.m, problem.n)
        stride = "i64" if wide else "i32"
        self.arguments |= {"residual_ptr": (pointer(problem.residual.dtype), "residual")}
        self.arguments |= {"residual_stride_m": (stride, ("residual", -2))}
        if problem.residual.layout != "row":
            self.arguments |= {"residual_stride_n": (stride, ("residual", -1))}
            return
        # Neighbours are adjacent: aligned pairs are loaded at once.
        self.constants["residual_stride_n"] = 1
        if problem.residual.aligned and problem.n % 8 == 0:
            self.divisible = {"N": 8, **self.divisible, "residual_ptr": 16, "residual_stride_m": 4}
            if c.stacked:
                self.divisible["residual_stride_z"] = 4

    def _add_factors(self) -> None:
        """Alpha and scales."""
        if self.problem.scaled:
            self.arguments["alpha"] = ("fp32", "alpha")
        self.arguments |= parts(self.problem) | scaled_step.arguments(self.problem)[0]

    def _promise_wide_stores(self) -> None:
        """Scattered rows and zeros are stored 16 bytes at a time."""
        c = self.c
        if c.STORED > 1 or (c.ZEROED and not c.POINTERS):
            step = ALIGNMENT // self.problem.out.dtype.itemsize
            whole = max(step, self.divisible.get("N", step))
            self.divisible |= {"out_ptr": ALIGNMENT, "out_stride": step, "N": whole}
