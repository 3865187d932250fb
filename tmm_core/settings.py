"""Settings of a process (environment variables) or of a ``with`` block: read once, then frozen.

======================  =========================================================
``TMM_ON_CACHE_MISS``   ``tune`` (default), ``background``, ``heuristic`` or ``error``
``TMM_KERNEL``          force one kernel, e.g. ``triton.split_k``
``TMM_VERIFY``          ``0``: a forced kernel is not verified at its first use
``TMM_DISABLE``         kernel names not to use, comma-separated
``TMM_BATCH_INVARIANT`` ``1``: a row's bits do not depend on the number of rows
``TMM_STATIC_WEIGHTS``  ``1``: no kernel that may still run when a product is called writes
                        its second operand, a matrix (docs/serve.md defines the promise)
``TMM_ARITHMETIC``      batch-invariant, with this arithmetic, as ``explain`` names it
``TMM_TUNE_BUDGET``     seconds a problem's tuning may take (default 20); starting the
                        compile processes, once in a process, does not count
``TMM_TUNE_MEMORY``     bytes that tuning and verifying may take, like ``2G`` (default: a
                        quarter each of a GPU's free memory, at most 8 and 4 GiB)
``TMM_TUNE_SHARE``      share of the time that tuning in the background takes (default 0.1)
``TMM_ENABLE``          ``1``: ``import tmm_core`` calls :func:`tmm_core.enable`
``TMM_PROGRESS``        ``0``: no progress display; ``1``: even without a terminal
======================  =========================================================

The registry reads which plugins to load (``TMM_PLUGINS``, ``TMM_DISABLE_PLUGINS``), the
cache where records are (``TMM_CACHE_DIR``, ``TMM_CACHE_PATH``).
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from numbers import Real
from types import NoneType
from typing import Any, Literal, Protocol, TypeAlias, TypeVar, get_args

import torch

from tmm_core.errors import SettingsError

T = TypeVar("T")

OnCacheMiss = Literal["tune", "background", "heuristic", "error"]
_CHOICES = get_args(OnCacheMiss)

_FLAGS = {"1": True, "true": True, "on": True, "yes": True}
_FLAGS |= {"0": False, "false": False, "off": False, "no": False, "": False}


def _is_instance(*kinds: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kinds)


#: A check of each field's values, and a description of the values. A flag is a bool: 1 would be
#: interned in place of True and change records' keys, and a text like "off" is true.
_TAKES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "on_cache_miss": (_CHOICES.__contains__, f"one of {', '.join(_CHOICES)}"),
    "kernel": (_is_instance(str, NoneType), "a kernel's name"),
    "disable": (lambda given: all(isinstance(name, str) for name in given), "kernels' names"),
    "deterministic": (_is_instance(bool), "True or False"),
    "batch_invariant": (_is_instance(bool), "True or False"),
    "static_weights": (_is_instance(bool), "True or False"),
    "arithmetic": (_is_instance(str, NoneType), "an arithmetic's name"),
    "tune_budget": (lambda s: isinstance(s, Real) and 0 < float(s) < math.inf, "positive seconds"),
    "tune_memory": (lambda n: n is None or (type(n) is int and n > 0), "positive bytes"),
    "tune_share": (
        lambda s: isinstance(s, Real) and 0 < float(s) <= 1,
        "a share, above 0, at most 1",
    ),
    "verify": (_is_instance(bool), "True or False"),
    "progress": (_is_instance(bool, NoneType), "True, False or None"),
}


@dataclass(frozen=True, eq=False)
class Settings:
    """Settings in force for a call. Compared by identity, which is cheap in a plan's key; equal
    settings are one object because :func:`override` interns them."""

    on_cache_miss: OnCacheMiss = "tune"
    #: Force this kernel, and this config of it (a JSON object as text, hashable).
    kernel: str | None = None
    config: str | None = None
    #: Verify a forced kernel at its first use. Other kernels are always verified.
    verify: bool = True
    disable: frozenset[str] = frozenset()
    deterministic: bool = False
    batch_invariant: bool = False
    #: The caller's promise that weights may be read before earlier launches have ended.
    static_weights: bool = False
    #: The arithmetic that sums every product; implies batch-invariant mode.
    arithmetic: str | None = None
    #: Seconds one problem's tuning may take.
    tune_budget: float = 20.0
    #: Bytes of tensors that a tuning, or a verification at first use, may hold in total, including
    #: each candidate's scratch memory. None: a share of the free memory.
    tune_memory: int | None = None
    #: Share of wall-clock time that ``on_cache_miss="background"`` spends on tuning.
    tune_share: float = 0.1
    #: None: show progress if stderr is a terminal.
    progress: bool | None = None
    #: The call is made inside a kernel's or plugin's code (:func:`nested`).
    nested: bool = False
    #: Other products run on the GPU at the same time (:func:`sharing_gpu`).
    shares_gpu: bool = False

    def __post_init__(self) -> None:
        for name, (takes, wanted) in _TAKES.items():
            if not takes(value := getattr(self, name)):
                raise SettingsError(f"{name} must be {wanted}, got {value!r}")
        if self.config is not None and self.kernel is None:
            raise SettingsError("config needs kernel: a config belongs to one kernel")

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Settings:
        """Read ``TMM_*``; errors name the variable.

        Raises:
            SettingsError: A value that is not accepted.
        """
        fields: dict[str, Any] = {}
        for name, (variable, convert) in VARIABLES.items():
            if (text := environ.get(variable)) is None:
                continue
            try:
                fields[name] = convert(text)
                cls(**{name: fields[name]})
            except (SettingsError, ValueError) as error:
                raise SettingsError(f"{variable}={text!r}: {error}") from None
        return cls(**fields)


def flag(text: str) -> bool:
    try:
        return _FLAGS[text.strip().lower()]
    except KeyError:
        raise ValueError("expected 1 or 0") from None


def number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"found {text!r}, accepted is a number") from None


def _size(text: str) -> int:
    from tmm_cache.size_limits import parse_size  # importing tmm_core imports no cache

    with suppress(ValueError):
        if (size := parse_size(text)) is not None:
            return size
    # TMM_CACHE_MAX_SIZE takes 0 for "no limit". Here 0 would silently mean the default.
    raise ValueError(f"found {text!r}, accepted is a size like 64M or 2G, above 0")


def names(text: str) -> frozenset[str]:
    """The comma-separated names in ``text``."""
    return frozenset(filter(None, (part.strip() for part in text.split(","))))


#: The name in ``TMM_DISABLE`` of the kernels that apply an epilogue and its derivative in training;
#: they are not candidates, and so not registered.
POINTWISE = "triton.pointwise"

#: Field to its variable and the converter from text.
VARIABLES: dict[str, tuple[str, Any]] = {
    "on_cache_miss": ("TMM_ON_CACHE_MISS", str),
    "kernel": ("TMM_KERNEL", lambda text: text.strip() or None),
    "verify": ("TMM_VERIFY", flag),
    "disable": ("TMM_DISABLE", names),
    "batch_invariant": ("TMM_BATCH_INVARIANT", flag),
    "static_weights": ("TMM_STATIC_WEIGHTS", flag),
    "arithmetic": ("TMM_ARITHMETIC", lambda text: text.strip() or None),
    "tune_budget": ("TMM_TUNE_BUDGET", number),
    "tune_memory": ("TMM_TUNE_MEMORY", _size),
    "tune_share": ("TMM_TUNE_SHARE", number),
    "progress": ("TMM_PROGRESS", flag),
}

_active: ContextVar[Settings | None] = ContextVar("tmm_settings", default=None)
#: The settings of the innermost override, None outside of any; part of a plan's key.
overridden = _active.get
_interned: dict[tuple[Any, ...], Settings] = {}
_DEFAULT = Settings()


def within(settings: Settings | None, function: Callable[..., T], *arguments: Any) -> T:
    """Call ``function(*arguments)`` under ``settings``, which :data:`overridden` returned in
    another thread: threads do not share overrides. ``static_weights`` is off: the second operand
    may have just been written, as a gradient in backward or as a weight that autocast cast."""
    # A compiled graph runs later, in any thread.
    if torch.compiler.is_dynamo_compiling():
        return function(*arguments)
    if (settings or _from_environment()).static_weights:
        settings = changed(settings or _from_environment(), static_weights=False)
    return _under(settings, function, *arguments)


def with_static_weights(function: Callable[..., T], *arguments: Any) -> T:
    """Call ``function(*arguments)`` under the current settings and ``static_weights``."""
    # A compiled graph runs later, under the settings of that time.
    if torch.compiler.is_dynamo_compiling():
        return function(*arguments)
    return _under(changed(current(), static_weights=True), function, *arguments)


def sharing_gpu(function: Callable[..., T], *arguments: Any) -> T:
    """Call ``function(*arguments)`` under settings by which its product leaves room for others that
    run at the same time (:meth:`Kernel.beside`)."""
    return _under(changed(current(), shares_gpu=True), function, *arguments)


def _under(settings: Settings | None, function: Callable[..., T], *arguments: Any) -> T:
    if overridden() is settings:
        return function(*arguments)
    token = _active.set(settings)
    try:
        return function(*arguments)
    finally:
        _active.reset(token)


class _Block:
    """A block that puts settings in force. Blocks may end in another order than they began in, as
    generators do that are used side by side."""

    __slots__ = ("before", "ended", "outer", "settings")

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        #: The settings before the block, and the block around it.
        self.before, self.outer = _active.get(), _block.get()
        self.ended = False


#: The innermost block of a context that has not ended, or has ended in another context.
_block: ContextVar[_Block | None] = ContextVar("tmm_block", default=None)


def _leave_ended() -> None:
    """Restore what was in force before the innermost blocks of this context that have ended."""
    innermost = block = _block.get()
    if innermost is None or not innermost.ended:
        return
    before: Settings | None = None
    while block is not None and block.ended:
        before = block.before
        block = block.outer
    _block.set(block)
    if _active.get() is innermost.settings:
        _active.set(before)


def innermost() -> tuple[Settings | None, _Block | None]:
    """The settings in force in this context, and their block."""
    return _active.get(), _block.get()


def put_back(before: tuple[Settings | None, _Block | None]) -> None:
    """Put what :func:`innermost` returned in force again, and end the blocks that began since."""
    _active.set(before[0])
    _block.set(before[1])


def _in_force(settings: Settings) -> Iterator[Settings]:
    """The steps of a context in which ``settings`` are in force."""
    block = _Block(settings)
    _block.set(block)
    _active.set(settings)
    try:
        yield settings
    finally:
        # This may be another context: another task finishes an asynchronous generator, or a web
        # framework leaves its dependency in another thread. If it is a copy, it has the block too.
        block.ended = True
        _leave_ended()


@contextmanager
def nested() -> Iterator[Settings]:
    """A context in which a plugin's code runs. BLAS serves the products that this code computes:
    the caller may hold the tuning lock, and may be querying that very kernel. Settings are part of
    a plan's key, so other calls do not replay these choices."""
    # The environment is not read: it may still change, and BLAS follows none of its settings.
    base = _active.get() or _DEFAULT
    if base.nested:
        yield base
    else:
        yield from _in_force(changed(base, nested=True, kernel=None, config=None))


@functools.lru_cache(256)
def changed(base: Settings, **changes: Any) -> Settings:
    """``base`` with these fields changed; equal calls return the same object."""
    return _intern(dataclasses.replace(base, **changes))


def _intern(settings: Settings) -> Settings:
    key = tuple(getattr(settings, field.name) for field in dataclasses.fields(Settings))
    return _interned.setdefault(key, settings)


def enabled_by_environment() -> bool:
    """Whether ``TMM_ENABLE`` is set; read when tmm is imported.

    Raises:
        SettingsError: It has a value that is not accepted.
    """
    text = os.environ.get("TMM_ENABLE", "")
    try:
        return flag(text)
    except ValueError as error:
        raise SettingsError(f"TMM_ENABLE={text!r}: {error}") from None


@functools.cache
def _from_environment() -> Settings:
    return _intern(Settings.from_environ(os.environ))


def current() -> Settings:
    """The settings in force here.

    Raises:
        SettingsError: A ``TMM_*`` variable has a value that is not accepted.
    """
    return _active.get() or _from_environment()


class _Config(Protocol):
    def to_json(self) -> dict[str, Any]: ...


#: A kernel's config (:class:`tmm_core.Config`), or a mapping of its fields.
ConfigLike: TypeAlias = Mapping[str, Any] | _Config | None


@contextmanager
def override(
    *,
    kernel: str | None = None,
    config: ConfigLike = None,
    disable: Iterable[str] = (),
    on_cache_miss: OnCacheMiss | None = None,
    **changes: Any,
) -> Iterator[Settings]:
    """Override settings inside a ``with`` block, in this thread or task only. A product's gradients
    use the settings under which it was computed, as under autocast. The block may end in another
    thread or task.

    Args:
        kernel: Force this kernel, which is verified at its first use unless ``verify`` is False.
        config: Force this config of it; a mapping of its fields will do.
        disable: Kernels not to use, in addition to those disabled already.
        on_cache_miss: ``"tune"``, ``"background"``, ``"heuristic"`` or ``"error"``.
        changes: ``deterministic``, ``batch_invariant``, ``arithmetic``, ``static_weights``,
            ``tune_budget``, ``tune_memory``, ``tune_share``, ``verify``, ``progress``.

    Raises:
        SettingsError: An unknown name or a value that is not accepted.
    """
    _leave_ended()  # a block may have ended in another context
    base = current()
    if kernel is not None:
        changes["kernel"] = kernel
        changes["config"] = None
    if config is not None:
        try:
            fields = dict(config) if isinstance(config, Mapping) else config.to_json()
            changes["config"] = json.dumps(fields, sort_keys=True)
        except (AttributeError, TypeError):
            raise SettingsError(
                f"config must be a mapping of a config's fields, got {config!r}"
            ) from None
    if on_cache_miss is not None:
        changes["on_cache_miss"] = on_cache_miss
    if isinstance(disable, str):
        disable = names(disable)
    disabled = frozenset(disable) if isinstance(disable, Iterable) else {disable}
    changes["disable"] = base.disable | disabled
    known = Settings.__dataclass_fields__.keys() - {"nested", "shares_gpu"}
    if unknown := sorted(changes.keys() - known):
        raise SettingsError(
            f"unknown setting {', '.join(unknown)}; known: {', '.join(sorted(known))}"
        )
    yield from _in_force(_intern(dataclasses.replace(base, **changes)))
