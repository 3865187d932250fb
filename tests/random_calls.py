"""Random calls of random kernels in random configs, each with its result in fp64.

Shapes divide nothing or much, operands have many layouts, and the memory between their elements
is NaN.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import tmm_core
from tmm_core import dispatch, formats, settings
from tmm_core.spec.kernel import Config, Kernel
from tmm_core.spec.problem import Problem

Tensor = torch.Tensor

#: An error that one rounding of the result explains, relative to the size of the results.
TOLERANCE = {torch.float16: 3e-3, torch.bfloat16: 2.4e-2, torch.float32: 3e-5}
#: The relative rounding of a quantised weight's values, which kernels may round to a's dtype.
ROUNDING = {torch.float16: 2.0**-12, torch.bfloat16: 2.0**-9}
#: Results near to the largest number of fp16 or beyond are not compared.
MOST_FP16 = 6e4

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "": lambda z: z,
    "silu": F.silu,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "softcap(3)": lambda z: 3 * torch.tanh(z / 3),
    "silu+tanh": lambda z: torch.tanh(F.silu(z)),
}
GATES = {"swiglu": F.silu, "geglu": F.gelu, "reglu": F.relu}
LAYOUTS = ("contiguous", "turned", "padded", "wide", "rows apart", "shifted", "repeated", "stepped")


@dataclass
class Call:
    """A call, and what its result must be.

    Attributes:
        make: Makes it.
        expected: The result in fp64; NaN where it is unspecified.
        slack: The difference that the sum's own roundings explain, in fp64.
        dtype: The dtype of ``a``.
        text: The arguments that were drawn.
    """

    make: Callable[[], Tensor]
    expected: Tensor
    slack: Tensor
    dtype: torch.dtype
    text: list[str]


@dataclass
class Draw:
    """Draws calls. ``small`` ones suit Triton's interpreter."""

    seed: int
    device: str
    small: bool
    text: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self._generator = torch.Generator(self.device).manual_seed(self.seed)

    def size(self) -> int:
        pick = self.random
        if self.small:
            return pick.choice([1, 2, 3, 5, 7, 8, 16, 17, 24, 33, 40])
        unit = pick.choice([1, 1, 8, 16, 64, 64])
        return unit * pick.randint(1, 700 // unit if unit < 16 else 24)

    def rows(self) -> int:
        few = (*range(1, 17), 31, 33, 64, 65, 127, 129)
        return self.random.choice(few) if self.random.random() < 0.5 else self.size()

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def tensor(self, what: str, *shape: int, dtype: torch.dtype, layouts: Any = LAYOUTS) -> Tensor:
        """A random tensor in one of these layouts."""
        values = torch.randn(shape, device=self.device, generator=self._generator)
        layout = self.random.choice(layouts)
        t = laid_out(values.mul_(self.random.choice([0.1, 1.0, 1.0, 4.0])).to(dtype), layout)
        self.text.append(f"{what} {tuple(shape)} {layout}")
        return t

    def weight(self, *shape: int, dtype: torch.dtype, form: str) -> tuple[Tensor, Tensor]:
        """``b`` of ``[..., N, K]`` turned, plain or quantised, and its values in fp64."""
        if not form:
            b = self.tensor("b", *shape[:-2], shape[-1], shape[-2], dtype=dtype)
            return b, b.double()
        given: dict[str, Any] = {}
        if form == "int4" or (form == "int8" and self.chance(0.4)):
            given["group"] = self.random.choice([32, 64, 128]) if form == "int4" else 128
        plain = self.tensor("b", *shape, dtype=dtype, layouts=("contiguous",))
        q = tmm_core.quantize(plain, form, **given)
        values = formats.named(q.format).values
        exact = values(q.stored, q.scale, q.zero, torch.float64, q.block, q.along)
        self.text.append(f"{form} {given}")
        return q.mT, exact.mT

    def call(self) -> Call:
        self.text = []
        return self._grouped() if self.chance(0.3) else self._plain()

    def _plain(self) -> Call:
        form, dtype, n, k, epilogue, alpha = self._common()
        lead = () if self.small else self.random.choice([(), (), (), (2,), (3, 2)])
        a = self.tensor("a", *lead, self.rows(), k, dtype=dtype)
        b, exact = self.weight(self._width(n, epilogue), k, dtype=dtype, form=form)
        z, squares = a.double() @ exact, a.double().square() @ exact.square()
        given: dict[str, Any] = {"alpha": alpha, "epilogue": epilogue or None}
        z, slack = self._alpha(z, squares, alpha, dtype, form)
        if self.chance(0.4):
            given["bias"] = self.tensor("bias", z.shape[-1], dtype=dtype, layouts=LAYOUTS[-3:])
            z = z + given["bias"].double()
        y, slack = activated(z, slack, epilogue)
        if self.chance(0.35):
            given["residual"] = self.tensor("residual", *y.shape, dtype=dtype)
            y = y + given["residual"].double()
        self._wider(given, dtype)
        return Call(functools.partial(tmm_core.matmul, a, b, **given), y, slack, dtype, self.text)

    def _grouped(self) -> Call:
        form, dtype, n, k, epilogue, alpha = self._common()
        groups, pick = self.random.choice([1, 2, 3, 5, 8]), self.random
        count = self.rows() * pick.choice([1, 2, 4])
        ends = sorted(pick.choice([0, count, pick.randint(0, count)]) for _ in range(groups))
        last, device = ends[-1], self.device
        self.text.append(f"groups end at {ends} of {count}")
        given: dict[str, Any] = {"alpha": alpha, "epilogue": epilogue or None}
        given["offs"] = torch.tensor(ends, dtype=torch.int32, device=device)
        given["a_index"] = self._indices(count) if self.chance(0.4) else None
        index = given["a_index"]
        many = count if index is None else int(index.max()) + 1
        a = self.tensor("a", many, k, dtype=dtype)
        b, exact = self.weight(groups, self._width(n, epilogue), k, dtype=dtype, form=form)
        rows = a.double() if index is None else a.double()[index.long()]
        of = torch.bucketize(torch.arange(count, device=device), given["offs"].long(), right=True)
        of = of.clamp(max=groups - 1)
        z = rows.new_empty(count, exact.shape[-1])
        squares = torch.empty_like(z)
        for g in range(groups):
            mine = rows[of == g]
            z[of == g], squares[of == g] = mine @ exact[g], mine.square() @ exact[g].square()
        z, slack = self._alpha(z, squares, alpha, dtype, form)
        if self.chance(0.4):
            shape = (groups, z.shape[-1]) if self.chance(0.5) else (z.shape[-1],)
            given["bias"] = self.tensor("bias", *shape, dtype=dtype, layouts=LAYOUTS[-3:])
            z = z + (given["bias"].double()[of] if len(shape) == 2 else given["bias"].double())
        y, slack = activated(z, slack, epilogue)
        if self.chance(0.3):
            weights = torch.rand(count, device=device, generator=self._generator).to(dtype)
            given["out_weights"] = weights
            y, slack = y * weights.double()[:, None], slack * weights.double()[:, None]
            self.text.append("weights of rows")
        place = torch.arange(count, device=device)
        scattered = self.chance(0.3)
        if scattered:
            place = torch.randperm(count, device=device, generator=self._generator)
            given["out_index"] = place
            self.text.append("scattered")
        beyond = torch.full_like(y, 0.0 if scattered else float("nan"))
        residual = None
        if self.chance(0.35):
            residual = given["residual"] = self.tensor("residual", *y.shape, dtype=dtype)
        expected, room = beyond, torch.zeros_like(slack)
        expected[place[:last]], room[place[:last]] = y[:last], slack[:last]
        if residual is not None:
            expected[place[:last]] += residual.double()[place[:last]]
        self._wider(given, dtype)
        return Call(
            lambda: tmm_core.grouped_matmul(a, b, **given), expected, room, dtype, self.text
        )

    def _common(self) -> tuple[str, torch.dtype, int, int, str, float]:
        pick = self.random
        form = pick.choice(["", "", "", "int8", "int4", "fp8", "mxfp4"])
        dtypes = [torch.bfloat16] * 3 + [torch.float16] * 2 + ([] if form else [torch.float32])
        k = 128 * pick.randint(1, 2 if self.small else 12) if form else self.size()
        epilogue = pick.choice([*GATES] if self.chance(0.2) else [*ACTIVATIONS])
        dtype, n, alpha = pick.choice(dtypes), self.size(), pick.choice([1.0, 1.0, 1.0, 0.5, -1.5])
        self.text.append(f"{dtype} {epilogue} alpha {alpha}")
        return form, dtype, n, k, epilogue, alpha

    @staticmethod
    def _width(n: int, epilogue: str) -> int:
        return 2 * n if epilogue in GATES else n

    @staticmethod
    def _alpha(
        z: Tensor, squares: Tensor, alpha: float, dtype: torch.dtype, form: str
    ) -> tuple[Tensor, Tensor]:
        """The scaled product, and what its roundings amount to."""
        each = ROUNDING[dtype] if form else 2.0**-20
        z = z * alpha
        return z, 5 * each * squares.sqrt() * abs(alpha) + z.abs() * 2.0**-18

    def _indices(self, count: int) -> Tensor:
        rows = self.random.choice([count, max(1, count // 3), 2 * count + 1])
        dtype = self.random.choice([torch.int32, torch.int64])
        shape = (count,)
        return torch.randint(
            rows, shape, device=self.device, generator=self._generator, dtype=dtype
        )

    def _wider(self, given: dict[str, Any], dtype: torch.dtype) -> None:
        if dtype is not torch.float32 and self.chance(0.2):
            given["out_dtype"] = torch.float32
            self.text.append("fp32 result")


def laid_out(t: Tensor, layout: str) -> Tensor:
    """The values of ``t`` in this layout, between NaN; a repeated one has its first row alone."""
    *lead, width = t.shape
    nan = float("nan")
    if layout == "turned" and t.dim() > 1:
        return t.mT.contiguous().mT
    if layout in ("padded", "wide"):
        room = t.new_full((*lead, width + (3 if layout == "padded" else 64)), nan)[..., :width]
    elif layout == "rows apart" and t.dim() > 1:
        room = t.new_full((*lead[:-1], 2 * lead[-1], width), nan)[..., ::2, :]
    elif layout == "shifted":
        room = t.new_full((t.numel() + 1,), nan)[1:].view(t.shape)
    elif layout == "stepped":
        room = t.new_full((*lead, 2 * width), nan)[..., ::2]
    elif layout == "repeated":
        return t[:1].expand(t.shape)
    else:
        return t.contiguous()
    return room.copy_(t)


def activated(z: Tensor, slack: Tensor, epilogue: str) -> tuple[Tensor, Tensor]:
    """The epilogue's result, and the difference that one of ``slack`` before it makes."""
    if epilogue in GATES:
        (z, up), (before, beside) = z.chunk(2, -1), slack.chunk(2, -1)
        gate, around = activated_by(GATES[epilogue], z, before)
        return gate * up, around * up.abs() + gate.abs() * beside + around * beside
    return activated_by(ACTIVATIONS[epilogue], z, slack)


def activated_by(function: Any, z: Tensor, slack: Tensor) -> tuple[Tensor, Tensor]:
    y = function(z)
    around = [(function(moved) - y).abs() for moved in (z + slack, z - slack)]
    return y, torch.maximum(*around)


class DescribedError(Exception):
    """Stops a call when its problem is known."""


def problem_of(make: Callable[[], Tensor], monkeypatch: Any) -> Problem:
    """The problem of a call."""
    problems: list[Problem] = []

    def bound(problem: Problem, current: Any) -> Any:
        problems.append(problem)
        raise DescribedError

    with monkeypatch.context() as patched:
        patched.setattr(dispatch.default_dispatcher(), "bound", bound)
        with pytest.raises(DescribedError):
            make()
    return problems[0]


def kernel_of(problem: Problem, pick: random.Random) -> tuple[Kernel[Any], Config]:
    """A random Triton kernel that can serve the problem, in a random config."""
    able, _ = dispatch.default_dispatcher().registry.candidates(problem, settings.current())
    kernel = pick.choice([each for each in able if each.name != "blas"])
    configs = [*kernel.configs(problem), kernel.default_config(problem)]
    return kernel, pick.choice(configs)


def fault_of(call: Call, found: Tensor) -> str | None:
    """How a result differs from what is expected; None if roundings explain it."""
    expected, found, result = call.expected, found.double(), found.dtype
    compared = expected.isfinite()
    if result is torch.float16:
        compared &= expected.abs() < MOST_FP16
    if not compared.any():
        return None
    size = expected[compared].square().mean().sqrt() + expected.abs()
    limit = TOLERANCE[call.dtype] * size + call.slack + 1e-6
    wrong = compared & ~((found - expected).abs() <= limit)
    if not wrong.any():
        return None
    at = tuple(wrong.nonzero()[0].tolist())
    of = f"{int(wrong.sum())} of {wrong.numel()} elements"
    return f"{of}, as {float(found[at])} for {float(expected[at])} at {at}"


def verify(draw: Draw, monkeypatch: Any, *, verified: bool) -> None:
    """Make a call by a random kernel, and compare it. A kernel that is not ``verified`` must be
    right without the help of tmm's verification."""
    call = draw.call()
    kernel, config = kernel_of(problem_of(call.make, monkeypatch), draw.random)
    with tmm_core.override(kernel=kernel.name, config=config.to_json(), verify=verified):
        fault = fault_of(call, call.make())
    assert fault is None, f"{call.text}, {kernel} {config}: {fault}"
