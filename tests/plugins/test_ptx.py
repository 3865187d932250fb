"""Tests edits of PTX: the lines that change, the lookup in Triton's cache, and the cost of a fault.

Compiling needs Triton not to be interpreting, so it is done in processes of their own.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")

from tmm_core.errors import TmmWarning
from tmm_core.triton import ptx
from tmm_core.triton.ptx import UnknownPTXError, _without, evict_first, joined, joined_ahead

LOAD = (
    "@%p7 cp.async.bulk.tensor.{d}d.shared::cluster.global.mbarrier::complete_tx::bytes"
    " [%r78], [%rd3, {{%r235, %r79}}], [%r77];"
)
STORE = "@%p29 cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd1, {%r222, %r223}], [%r4];"


@pytest.mark.parametrize("dimensions", [2, 3])
def test_loads_are_hinted_and_nothing_else(dimensions: int) -> None:
    load = LOAD.format(d=dimensions)
    out = evict_first(f"{load}\n{STORE}\n{load}\nld.global.b32 %r1, [%rd1];")
    lines = out.splitlines()
    assert lines[0] == lines[2]
    assert "complete_tx::bytes.L2::cache_hint [%r78]," in lines[0]
    assert lines[0].endswith("[%r77], 0x12F0000000000000;")
    assert lines[1] == STORE
    with pytest.raises(UnknownPTXError):
        evict_first(out)


def products(*columns: int, a: str = "%rd1", sums: str = "%r") -> str:
    """PTX of a group of products of 64 rows."""
    lines = [
        f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16 {{{sums}{n},{sums}1{n}}},"
        f" {a}, %rdb{n}, %p{i}, 1, 1, 0, 0;"
        for i, n in enumerate(columns)
    ]
    return "\n".join(["wgmma.fence.sync.aligned;", *lines, "wgmma.commit_group.sync.aligned;"])


def test_two_products_are_one() -> None:
    wait = "wgmma.wait_group.sync.aligned {};"
    ptx = [products(128, 64), "mov.b32 %r9, 0;", products(16, 16), wait.format(2)]
    out = joined("\n".join([*ptx, wait.format(0), "ret;"]))
    assert out.count("wgmma.commit_group") == 1
    assert [line for line in out.splitlines() if "mma_async" in line or "wait" in line] == [
        "wgmma.mma_async.sync.aligned.m64n144k16.f32.bf16.bf16 {%r128,%r1128,%r16,%r116},"
        " %rd1, %rdb128, %p0, 1, 1, 0, 0;",
        "wgmma.mma_async.sync.aligned.m64n80k16.f32.bf16.bf16 {%r64,%r164,%r16,%r116},"
        " %rd1, %rdb64, %p1, 1, 1, 0, 0;",
        wait.format(1),
        wait.format(0),
    ]
    # After the instructions that initialise the second product's sums.
    assert out.index("mov.b32") < out.index("mma_async")


def test_the_second_product_may_come_first() -> None:
    """Only the first's descriptor has the distance between boxes of a row-major ``b``."""
    out = joined_ahead(products(128) + products(16) + "wgmma.wait_group.sync.aligned 0;")
    block = out[out.index("{\n") : out.index("\n}")].splitlines()
    assert block == [
        "{",
        ".reg .b64 tmm_b;",
        "bfi.b64 tmm_b, %rdb16, %rdb128, 0, 14;",
        "wgmma.mma_async.sync.aligned.m64n144k16.f32.bf16.bf16 {%r16,%r116,%r128,%r1128},"
        " %rd1, tmm_b, %p0, 1, 1, 0, 0;",
    ]
    assert out.count("mma_async") == 1


def test_pairs_of_products_become_one() -> None:
    columns = ((128, 16), (64, 32), (32, 16))
    pairs = [products(first) + products(second) for first, second in columns]
    out = joined("\n".join([*pairs, "wgmma.wait_group.sync.aligned 4;"]))
    assert re.findall(r"m64n(\d+)k", out) == ["144", "96", "48"]
    assert out.count("wgmma.commit_group") == 3
    assert "wait_group.sync.aligned 2;" in out
    with pytest.raises(UnknownPTXError, match="pairs"):
        joined("".join(pairs) + products(8))


class Hooked:
    """A stand-in for Triton's knobs, and a compilation that uses its hook."""

    def __init__(self, hook: Any = None) -> None:
        self.add_stages_inspection_hook = hook

    def compiled(self, text: str, *stages: str) -> str:
        """The PTX that the hook makes of this text."""
        if self.add_stages_inspection_hook is None:
            return text
        made: dict[str, Any] = dict.fromkeys(stages or ("ptx",), lambda *_: text)
        self.add_stages_inspection_hook(None, made, None, None, None)
        return str(made.get("ptx", lambda *_: "")(None, None))


@pytest.fixture
def knobs(monkeypatch: pytest.MonkeyPatch) -> Hooked:
    hooked = Hooked()
    monkeypatch.setattr(ptx, "knobs", SimpleNamespace(runtime=hooked))
    return hooked


def test_the_hook_is_installed_while_a_kernel_with_edits_is_compiled(knobs: Hooked) -> None:
    load = LOAD.format(d=2)
    with ptx.edited("one", ["evict_first"]):
        assert knobs.add_stages_inspection_hook() == ("", "")
        assert knobs.compiled(load) == evict_first(load)
        with ThreadPoolExecutor(1) as pool:  # a thread without edits
            assert pool.submit(knobs.compiled, load).result() == load

            def inside() -> str:
                with ptx.edited("two", ["joined"]):
                    return knobs.compiled(products(128) + products(16))

            assert "m64n144k" in pool.submit(inside).result()
        assert knobs.compiled(load) == evict_first(load)
    assert knobs.add_stages_inspection_hook is None
    ptx._triton_hook(None, stages := {"ptx": load}, None)
    assert stages == {"ptx": load}


def test_edits_are_made_in_their_order(knobs: Hooked) -> None:
    with ptx.edited("one", ["evict_first", "joined_ahead"]):
        out = knobs.compiled(LOAD.format(d=2) + products(128) + products(16))
    assert "cache_hint" in out
    assert "tmm_b" in out


def test_the_hook_of_another_is_called_and_restored(knobs: Hooked) -> None:
    calls: list[Any] = []
    theirs = knobs.add_stages_inspection_hook = lambda *given: calls.append(given) or ("k", "h")
    with ptx.edited("one", ["evict_first"]):
        assert knobs.add_stages_inspection_hook() == ("k", "h")
        knobs.compiled(LOAD.format(d=2))
    assert [len(given) for given in calls] == [0, 5]
    assert knobs.add_stages_inspection_hook is theirs
    with ptx.edited("one", ["evict_first"]):
        knobs.add_stages_inspection_hook = len  # by others, in the meantime
    assert knobs.add_stages_inspection_hook is len


def test_a_kernel_that_cannot_be_edited_is_compiled_with_a_warning(knobs: Hooked) -> None:
    with ptx.edited("one", ["evict_first"]):
        with pytest.warns(TmmWarning, match="one: loads are not .*: its PTX has no bulk"):
            assert knobs.compiled("ret;") == "ret;"
        with pytest.warns(TmmWarning, match="one: .*: Triton compiles it without PTX"):
            knobs.compiled("ret;", "llir")
    with ptx.edited("one", ["joined_ahead"]), pytest.raises(UnknownPTXError, match="one: joined_a"):
        knobs.compiled("ret;")
    del knobs.add_stages_inspection_hook
    with (
        pytest.warns(TmmWarning, match="one: neighbouring .*: .* no stage inspection hook"),
        ptx.edited("one", ["joined"]),
    ):
        assert not hasattr(knobs, "add_stages_inspection_hook")


def test_a_kernel_with_edits_has_its_own_key() -> None:
    def key(*edits: str) -> str:
        return str(ptx.marked(SimpleNamespace(hash=lambda: "key"), edits).hash())  # type: ignore[arg-type]

    keys = [key("evict_first"), key("joined"), key("evict_first", "joined")]
    assert len({*keys, "key"}) == 4
    assert keys[0] == key("evict_first")


def test_a_kernel_that_is_wrong_without_an_edit_is_not_compiled() -> None:
    with pytest.raises(UnknownPTXError, match="one: joined_ahead cannot be made: it is old"):
        _without("one", ["joined_ahead"], "it is old")


@pytest.mark.parametrize(
    "ptx",
    [
        "ret;",
        products(128),
        products(128, 128) + products(16),
        products(128) + products(16, a="%rd2"),
        products(128) + products(16).replace("bf16.bf16", "f16.f16"),
        products(128) + products(16).replace("%p0", "%p1"),
        products(128) + products(16) + "wgmma.wait_group.sync.aligned 1;",
        products(128) + products(16) + products(128),
    ],
)
def test_other_products_stay_apart(ptx: str) -> None:
    with pytest.raises(UnknownPTXError, match="pairs"):
        joined(ptx)


PROGRAM = """
import json, os, sys, warnings
from dataclasses import replace
sys.path.insert(0, {tests!r})
from test_warp_specialized import KERNEL, problem
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from tmm_core.triton import compile_for, ptx, source
from tmm_triton.hopper.hopper_kernel import warp_specialized_kernel

assembled, theirs = [], []
make_cubin = CUDABackend.make_cubin
CUDABackend.make_cubin = lambda *args: assembled.append(1) or make_cubin(*args)
hook, load, product = ptx._HOOK, ptx._LOAD, ptx._PRODUCT
asked = problem(384, 6144, 4096)
config = next(config for config in KERNEL.configs(asked) if config.narrow)
assert config.evict_first
of = KERNEL.specialize(asked, config)
found = {{}}
for fault in "", "kept", "no hook", "other PTX", "theirs":
    assembled.clear()
    knobs.cache.dir = os.path.join({folder!r}, "" if fault == "kept" else fault)
    ptx._HOOK = "looked for in vain" if fault == "no hook" else hook
    ptx._LOAD = ptx.re.compile("(bulk)( loads);") if fault == "other PTX" else load
    ptx._PRODUCT = ptx.re.compile("product") if fault == "other PTX" else product
    if fault == "theirs":
        knobs.runtime.add_stages_inspection_hook = lambda *a: theirs.append(len(a)) or ("k", "h")
    src = source(warp_specialized_kernel, of.types, of.constants, of.divisible)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            kernel = compile_for(GPUTarget("cuda", 90, 32), src, **of.options)
        except Exception as error:
            found[fault] = dict(raised=repr(error), edits=list(config.edits))
            continue
    text = kernel.asm["ptx"]
    found[fault] = dict(
        assembled=len(assembled), hints=text.count("L2::cache_hint"),
        loads=text.count("complete_tx::bytes"), warnings=[str(w.message) for w in seen],
        products=sorted({{int(n) for n in ptx.re.findall("mma_async.*m64n([0-9]+)k", text)}}),
        hook=knobs.runtime.add_stages_inspection_hook is not None, theirs=theirs[-1:],
        tile=config.BLOCK_N,
    )
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The results of all cases, from one process, since a process takes seconds to start."""
    folder = tmp_path_factory.mktemp("evict_first")
    environment = {
        **os.environ, "TRITON_INTERPRET": "0", "TMM_CACHE_DIR": str(folder / "tmm"),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }  # fmt: skip
    program = PROGRAM.format(tests=str(Path(__file__).parent), folder=str(folder))
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_a_kernel_is_assembled_once_with_its_edits(found: Any) -> None:
    first = found[""]
    assert first["hints"] == first["loads"] > 0
    assert first["products"] == [first["tile"]]
    assert (first["assembled"], first["warnings"], first["hook"]) == (1, [], False)
    assert found["kept"] == {**first, "assembled": 0}


@pytest.mark.parametrize(
    ("fault", "says"),
    [("no hook", ["inspection hook"] * 2), ("other PTX", ["no bulk", "in pairs"])],
)
@pytest.mark.slow
def test_without_a_way_to_edit_it_stays_as_it_was(found: Any, fault: str, says: list[str]) -> None:
    case = found[fault]
    if "joined_ahead" in case.get("edits", ()):  # with a Triton whose views end with their boxes
        assert re.search("joined_ahead cannot be made.*" + says[1], case["raised"])
        return
    assert (case["hints"], case["assembled"]) == (0, 1)
    wide, narrow = sorted(case["products"], reverse=True)
    assert wide + narrow == case["tile"]
    for warning, part in zip(case["warnings"], says, strict=True):
        assert part in warning


def test_another_hook_is_called_too_and_kept(found: Any) -> None:
    case = found["theirs"]
    assert case["hints"] == case["loads"] > 0
    assert case["theirs"] == [5]
    assert case["hook"]
