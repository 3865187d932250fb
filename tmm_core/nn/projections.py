"""Attention whose projections of one input are one product.

The attention's own forward runs and calls its projections as before. The first projection then
computes the product for all. Each of the others returns its own columns of the result if it is
called with the very same tensor. So hooks, slices and calls from elsewhere keep their meaning.

The forward's source shows which layers project the same tensor. It also shows that their results
are only split into heads: columns of a wider result cannot be viewed in every way.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from tmm_base.guards import suppress
from torch import nn

from tmm_core import api, compat
from tmm_core.interop import autograd_state
from tmm_core.nn.classes import own, subclass
from tmm_core.nn.gated_product import joint_linear
from tmm_core.nn.linear import Linear
from tmm_core.nn.reached import Reached, body
from tmm_core.nn.together import Together, joint_of, only_multiply
from tmm_core.quantized import Quantized
from tmm_core.settings import with_static_weights

Tensor = torch.Tensor
#: Statements that may change a tensor.
_EFFECTS = (ast.Expr, ast.AugAssign, ast.Delete)


class JointProjections(Together):
    """Base of the classes of attention that compute projections in one product.

    With gradients, and wherever a layer or its weight has changed, each projection is computed by
    itself.
    """

    #: Names of the projections.
    _names: Sequence[str] = ()

    def _together(self) -> list[Any]:
        return [self._modules.get(name) for name in self._names]

    def _swapped_out(self) -> None:
        super()._swapped_out()
        for layer in self._together():
            getattr(layer, "__dict__", {}).pop("_joint_product", None)  # a compiled graph leaves it


def joint(kind: Any, names: tuple[str, ...]) -> Any:
    """Return the class of attention of ``kind`` with joint projections."""
    proven = kind.forward
    reached = Reached((body(proven),), names=((kind, "forward", proven),))

    @functools.wraps(proven)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        layers = [self._modules.get(name) for name in names]
        usual = reached.holds(self) and not compat.global_hooks()
        if not usual or not all(type(layer) is Linear for layer in layers):
            return kind.forward(self, *args, **kwargs)
        _set_product(layers, JointProduct(layers))
        try:
            return kind.forward(self, *args, **kwargs)
        finally:
            _set_product(layers, None)

    origin = joint, kind, names
    return subclass(kind, JointProjections, origin, origin, forward=forward, _names=names)


def _set_product(layers: Sequence[Any], product: JointProduct | None) -> None:
    for layer in layers:
        if torch.compiler.is_compiling():  # the compiler has to see the assignment
            layer._joint_product = product
        elif product is None:
            layer.__dict__.pop("_joint_product", None)
        else:  # nn.Module's way takes a microsecond
            layer.__dict__["_joint_product"] = product


class JointProduct:
    """The joint product of one call of an attention's forward.

    Several threads may run one attention at once, and find the product that another thread left
    in the layers. So a tensor and its projections are one object, which is replaced as a whole.
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        self._layers = layers
        #: The input, its version, and the projections that no layer has taken yet, by its place.
        self._found: tuple[Tensor, int, dict[int, Tensor]] | None = None

    def of(self, layer: Any, x: Tensor) -> Tensor | None:
        """Return the projection of ``x`` by ``layer``. None: the layer computes it, because the
        product is of another tensor, or ``x`` has changed since."""
        found = self._found
        if found is None:
            found = self._found = x, _version(x), self._product(x)
        input, version, columns = found
        if x is not input or _version(x) != version:
            return None
        return columns.pop(self._layers.index(layer), None)

    def _product(self, x: Tensor) -> dict[int, Tensor]:
        layers = self._layers
        if not only_multiply(layers, x):
            return {}
        weights = [layer._parameters["weight"] for layer in layers]
        biases = [layer._parameters["bias"] for layer in layers]
        if autograd_state.recorded(x, *weights, *biases):
            return {}
        if torch.compiler.is_compiling():
            if any(type(weight) is Quantized for weight in weights):
                return {}
            if len({bias is None for bias in biases}) > 1:
                return {}
            y = joint_linear(x, weights, biases)
        else:
            operands = joint_of(weights, biases)
            if operands is None:
                return {}
            if all(layer.static_weights and not layer._state_dict_pre_hooks for layer in layers):
                y = with_static_weights(api.linear, x, *operands)
            else:
                y = api.linear(x, *operands)
        columns = y.split([len(weight) for weight in weights], -1)
        return dict(enumerate(columns))


def _version(x: Tensor) -> int:
    """Return a number that changes when ``x`` is written. It is 0 in compiled graphs, which have no
    writes. It is also 0 in inference mode, where torch does not count writes and the forward's
    source has to suffice."""
    return 0 if torch.compiler.is_compiling() or x.is_inference() else x._version


# -- which layers project the same tensor ----------------------------------------------------------


def names_of(kind: type[nn.Module]) -> tuple[str, ...]:
    """Return the names of the children that project one input and whose results the forward only
    splits into heads. Empty if there are fewer than two."""
    return _projected(own(kind).forward)


@functools.cache
def _projected(forward: Any) -> tuple[str, ...]:
    function = None
    with suppress(OSError, TypeError, ValueError, SyntaxError):  # ValueError: it wraps itself
        function = ast.parse(textwrap.dedent(inspect.getsource(forward))).body[0]
    if not isinstance(function, ast.FunctionDef):
        return ()
    heads = dict(_head_shapes(function))
    found: dict[str, list[tuple[int, str]]] = {}
    for number, step in enumerate(function.body):
        for x, name in _projections(step, heads):
            found.setdefault(x, []).append((number, name))
    for x, calls in found.items():
        names = [name for _, name in calls]
        between = function.body[calls[0][0] : calls[-1][0] + 1]
        results = {n.id for number, _ in calls for n in _stored(function.body[number])}
        alone = len(names) == len(set(names)) > 1 and _only_projected(x, between, len(names))
        if alone and not _is_viewed(results, function):
            return tuple(names)
    return ()


def _head_shapes(function: ast.FunctionDef) -> Iterator[tuple[str, str]]:
    """Yield the names of each shape ``(*x.shape[:-1], -1, self.head_dim)`` and of its ``x``."""
    written = [n.id for n in _stored(function)]
    leading: dict[str, str] = {}
    for step in function.body:
        match step:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if written.count(name) == 1:
                match value:
                    case ast.Subscript(value=ast.Attribute(value=ast.Name(id=x), attr="shape")):
                        if ast.unparse(value.slice) == ":-1":
                            leading[name] = x
                    case ast.Tuple(elts=[ast.Starred(value=ast.Name(id=of)), _, _]):
                        if of in leading and written.count(leading[of]) == 0:
                            yield name, leading[of]


def _projections(step: ast.stmt, heads: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Yield ``x`` and ``name`` of each ``self.name(x).view(shape)`` of a step without
    conditions."""
    branches = (ast.IfExp, ast.BoolOp, ast.Lambda, ast.comprehension)
    nodes = list(ast.walk(step))
    if not isinstance(step, ast.Assign) or any(isinstance(n, branches) for n in nodes):
        return
    for node in nodes:
        match node:
            case ast.Call(
                func=ast.Attribute(
                    value=ast.Call(
                        func=ast.Attribute(value=ast.Name(id="self"), attr=name),
                        args=[ast.Name(id=x)],
                        keywords=[],
                    ),
                    attr="view",
                ),
                args=[ast.Name(id=shape) | ast.Starred(value=ast.Name(id=shape))],
                keywords=[],
            ) if heads.get(shape) == x:
                yield x, name


def _only_projected(x: str, steps: Sequence[ast.stmt], calls: int) -> bool:
    """Whether these steps use ``x`` in nothing but the projections, and only assign to variables.
    Other steps may change ``x`` by another name, or a weight."""
    nodes = [node for step in steps for node in ast.walk(step)]
    stored = {type(node) for node in nodes if isinstance(getattr(node, "ctx", None), ast.Store)}
    if not stored <= {ast.Name, ast.Tuple} or any(type(n) in _EFFECTS for n in nodes):
        return False
    return sum(name.id == x for step in steps for name in _names(step)) == calls


def _is_viewed(results: set[str], function: ast.FunctionDef) -> bool:
    """Whether the forward views a result again, as only a contiguous one can be viewed."""
    for node in ast.walk(function):
        match node:
            case ast.Call(func=ast.Attribute(value=value, attr="view" | "view_as")):
                if any(name.id in results for name in _names(value)):
                    return True
    return False


def _stored(step: ast.AST) -> list[ast.Name]:
    return [name for name in _names(step) if isinstance(name.ctx, ast.Store)]


def _names(step: ast.AST) -> list[ast.Name]:
    return [node for node in ast.walk(step) if isinstance(node, ast.Name)]
