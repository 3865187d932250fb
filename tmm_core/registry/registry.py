"""Loads plugins once, validates their kernels and epilogues, and lists which can serve a problem.

A plugin is a module (or object) with the hooks of :mod:`tmm_core.spec.hookspecs`, found through the
entry-point group ``tmm_core``. tmm's own Triton kernels are registered the same way. BLAS is
registered by the core: it serves if no metadata can be read, and under any choice of plugins.
A broken plugin is reported once, by name and distribution, and costs only itself.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from tmm_base.guards import drop_frames, foreign_place, suppress
from tmm_cache.fields import A_NAME, NAME_MAX, is_name

from tmm_core import compat, formats
from tmm_core.epilogues import EPILOGUES, parse
from tmm_core.errors import (
    PluginError,
    UnknownNameError,
    error_message,
    error_text,
    plain_text,
    reraise,
    shown,
    warn_of_plugin,
)
from tmm_core.formats import Format
from tmm_core.launch import warm
from tmm_core.launch.collector import collector_off
from tmm_core.launch.nesting import turn
from tmm_core.registry.hooks import HOOKS, Hooks
from tmm_core.registry.query import CheckedKernel
from tmm_core.registry.watched_call import putting_back
from tmm_core.settings import POINTWISE, Settings, names, nested
from tmm_core.spec.code import format_code
from tmm_core.spec.epilogue import IDENTITY, INTERNED, Epilogue, EpilogueLike
from tmm_core.spec.kernel import Kernel
from tmm_core.spec.launcher import BASELINE
from tmm_core.spec.problem import Problem
from tmm_core.spec.watch import watched
from tmm_core.version import __version__

#: The distribution of this package.
DISTRIBUTION = "tmm-core"
#: The entry-point group of plugins.
GROUP = "tmm_core"
#: The entry point of BLAS; the core registers its kernel without it.
_BLAS_PLUGIN = "tmm_blas.plugin"


class Source(NamedTuple):
    """The origin of a kernel or epilogue."""

    plugin: str
    distribution: str = ""
    version: str = ""

    @classmethod
    def of(cls, entry_point: importlib.metadata.EntryPoint) -> Source:
        """The origin of an entry point's plugin, as far as the metadata can be read."""
        found = {"name": "", "version": ""}
        with suppress(BaseException):  # damaged metadata: the plugin may still load
            for field in found:
                found[field] = _label(getattr(entry_point.dist, field))
        name = re.sub(r"[-_.]+", "-", found["name"]).lower()  # as installers normalise
        return cls(_label(entry_point.name), name, found["version"])

    @property
    def is_ours(self) -> bool:
        """Whether it is one of tmm's own plugins."""
        return self.distribution == DISTRIBUTION

    def __str__(self) -> str:
        where = f" ({self.distribution} {self.version})" if self.distribution else ""
        return f"plugin {self.plugin!r}{where}"


def _label(name: object) -> str:
    """A name of a plugin or distribution, fit for messages."""
    return plain_text(name if isinstance(name, str) else shown(name), NAME_MAX)


@dataclass(frozen=True)
class Fault:
    """A plugin, or one of its kernels or epilogues, that is not used, with the reason."""

    source: Source
    reason: str
    #: The exception that was the reason, if one was, without its frames, and its file and line.
    error: BaseException | None = None
    place: str = ""
    #: Disabled on purpose rather than broken.
    intended: bool = False

    def __str__(self) -> str:
        known = not self.place or self.place in self.reason
        return f"{self.source}: {self.reason}" + ("" if known else f" ({self.place})")


class Registry:
    """Plugins, and their kernels and epilogues.

    Args:
        entry_points: Called once, on first use; yields the entry points to load.
        allow: Load only the plugins of these names (``None``: all).
        deny: Do not load these.
        baseline: Returns the kernel that is always registered; called once, on first use.
    """

    def __init__(
        self,
        entry_points: Callable[[], Iterable[importlib.metadata.EntryPoint]] = lambda: (),
        allow: frozenset[str] | None = None,
        deny: frozenset[str] = frozenset(),
        baseline: Callable[[], Kernel[Any]] | None = None,
    ) -> None:
        self._entry_points = entry_points
        self._allow = allow
        self._deny = deny
        self._baseline = baseline
        #: The plugins, and pluggy's manager of them (``hooks.manager``).
        self.hooks = Hooks()
        #: Plugins with their origins, by the plugin's id.
        self._plugins: dict[int, tuple[object, Source]] = {}
        self._kernels: dict[str, CheckedKernel] = {}
        self._epilogues: dict[str, tuple[Epilogue, Source]] = {
            epilogue.name: (epilogue, Source("tmm_core")) for epilogue in EPILOGUES.values()
        }
        self._faults: list[Fault] = []
        #: Faults that no warning has mentioned yet.
        self._unreported: list[Fault] = []
        #: Names of all installed plugins, in use or not.
        self._installed: set[str] = set()
        self._loaded = self._loading = False
        #: The number of plugins that were registered by hand; choices follow from it.
        self.registered = 0
        self.loading_lock = threading.RLock()

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Registry:
        """Installed plugins, filtered by ``TMM_PLUGINS`` and ``TMM_DISABLE_PLUGINS``."""
        allow = environ.get("TMM_PLUGINS")
        return cls(
            _installed,
            allow=names(allow) if allow is not None else None,
            deny=names(environ.get("TMM_DISABLE_PLUGINS", "")),
            baseline=_blas,
        )

    def after_fork(self) -> None:
        """Replace locks that another thread of the parent process may hold."""
        self.loading_lock = threading.RLock()

    # -- loading ---------------------------------------------------------------------

    def register(self, plugin: object, name: str | None = None) -> None:
        """Add a plugin explicitly: a module or object with tmm's hooks. Calls that follow choose
        anew, with its kernels.

        Raises:
            PluginError: Its hooks do not match the specs, or return unusable objects.
        """
        self.load()
        with self.loading_lock:
            with self._all_or_nothing(), nested():
                source = Source(_label(name or getattr(plugin, "__name__", type(plugin).__name__)))
                before = len(self._faults)
                self._call_hooks([plugin] if self._take(plugin, source) else [])
            found = self._faults[before:]
            self._unreported += [fault for fault in found if fault.source != source]
            self.registered += 1
        warm.forget_plans()
        self._report()
        for fault in found:
            if fault.source == source:
                raise PluginError(str(fault)) from fault.error

    def load(self) -> None:
        """Load the entry points, once; called wherever they are needed.

        The import of a plugin may compute a product and call this method again. The kernels
        registered so far serve that product, also in a thread that the import waits for. If a
        signal's exception interrupts loading, the next call starts again.
        """
        if not self._loaded:
            with turn(self.loading_lock, likely=True) as mine:
                if self._loading or not mine:
                    return
                if not self._loaded:
                    # Tensors that a module makes outlive the mode of the first call.
                    with (
                        compat.without_modes(), torch.inference_mode(False),
                        self._all_or_nothing(), collector_off(), nested(),
                    ):  # fmt: skip
                        self._load_all()
        if self._unreported:
            self._report()

    def _load_all(self) -> None:
        self._add_baseline()
        found: list[tuple[Source, importlib.metadata.EntryPoint]] = []
        with self._costing(Source(GROUP), "installed plugins cannot be listed"):
            for each in self._entry_points():
                # The core registers its baseline itself.
                if self._baseline is None or getattr(each, "value", "") != _BLAS_PLUGIN:
                    found.append((Source.of(each), each))
        self._installed = {source.plugin for source, _ in found}
        # tmm's own first, so that others cannot take their names.
        found.sort(key=lambda each: (not each[0].is_ours, each[0].distribution, each[0].plugin))
        for source, entry_point in found:
            self._load(source, entry_point)
        # All are registered before a hook is called: wrappers apply to other plugins' hooks.
        # A plugin that an import registered has been called.
        loaded = [(each, by) for each, by in self._plugins.values() if by in dict(found)]
        for ours in (True, False):
            self._call_hooks([each for each, by in loaded if by.is_ours is ours])
        self._unreported += [fault for fault in self._faults if not fault.intended]
        self._loaded = True

    def _add_baseline(self) -> None:
        if BASELINE in self._kernels:
            return  # also in a thread that the import of a plugin waits for
        with self.loading_lock:
            if self._baseline is not None and BASELINE not in self._kernels:
                source = Source(BASELINE, DISTRIBUTION, __version__)
                self._kernels[BASELINE] = CheckedKernel(self._baseline(), source)

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """A context after which, if an exception leaves it, the registry is as before."""
        tables = dict(self._plugins), dict(self._kernels), dict(self._epilogues)
        faults, manager = list(self._faults), self.hooks.manager
        registered = set(map(id, manager.get_plugins()))
        outer, self._loading = self._loading, True
        try:
            yield
        except BaseException:
            for plugin in manager.get_plugins():
                if id(plugin) not in registered:
                    manager.unregister(plugin)
            self._plugins, self._kernels, self._epilogues = tables
            self._faults = faults
            raise
        finally:
            self._loading = outer

    def _report(self) -> None:
        """Warn once of each distribution with unreported faults, and of how many there are."""
        while True:
            with self.loading_lock:
                if not self._unreported:
                    return
                first = self._unreported[0]
                # Without a distribution, plugins cannot be distinguished by their installation.
                rest = [
                    fault
                    for fault in self._unreported
                    if fault.source.distribution != first.source.distribution
                ]
                more = len(self._unreported) - len(rest) - 1
                # State first: under `-W error` the warning raises, and the next call goes on here.
                self._unreported = rest
            used = any(kernel.source == first.source for kernel in self._kernels.values())
            message = f"{first.source} is {'partly' if used else 'not'} used: {first.reason}"
            warn_of_plugin(first.source, message, first.place, more)

    def _load(self, source: Source, entry_point: importlib.metadata.EntryPoint) -> None:
        if source.plugin in self._deny:
            self._faults.append(Fault(source, "disabled by TMM_DISABLE_PLUGINS", intended=True))
        elif self._allow is not None and source.plugin not in self._allow:
            self._faults.append(Fault(source, "not in TMM_PLUGINS", intended=True))
        else:
            with self._costing(source, "import failed"):
                with self._watched("the import", source):
                    plugin = entry_point.load()
                self._take(plugin, source)

    @contextmanager
    def _watched(self, what: str, source: Source) -> Iterator[None]:
        """A context for an import or a hook of ``source``. It restores how torch computes."""
        around = nullcontext(list[str]()) if source.is_ours else putting_back()
        advice = f"to do without it, set TMM_DISABLE_PLUGINS={source.plugin}"
        message = f"{what} of {source} does not return; {advice}"
        with watched(lambda: message), around as changed:
            yield
        if changed:
            reason = f"{what} changed {' and '.join(changed)}, which was put back"
            self._faults.append(Fault(source, reason))

    @contextmanager
    def _costing(self, source: Source, failed: str) -> Iterator[None]:
        """A context that turns any exception of a plugin's code into a fault of ``source``. The
        fault has the text of a PluginError, or ``failed`` and the text of another exception."""
        try:
            yield
        except BaseException as error:
            reraise(error)
            if type(error) is PluginError:
                self._faults.append(_fault(source, error_message(error), error.__cause__))
            else:
                self._faults.append(_fault(source, f"{failed}: {error_text(error)}", error))

    def _take(self, plugin: object, source: Source) -> bool:
        """Register a plugin with pluggy, which checks signatures; returns whether its hooks can be
        called."""
        with self._costing(source, "cannot be registered"):
            faults = self.hooks.register(plugin, source.plugin)
            self._plugins[id(plugin)] = plugin, source
            self._faults += [Fault(source, reason) for reason in faults]
            return True
        return False

    def _call_hooks(self, plugins: Sequence[object]) -> None:
        """Call each plugin's hooks separately, with the others' wrappers."""
        adders = (self._add_kernel, self._add_epilogue, self._add_format)
        for hook, add in zip(HOOKS, adders, strict=True):
            for plugin in self.hooks.in_order(hook, plugins):
                _, source = self._plugins[id(plugin)]
                with self._costing(source, f"{hook} failed"):
                    with self._watched(hook, source):
                        things, failed = self.hooks.call(hook, plugin)
                    for wrapper, failure in failed:
                        reason = (
                            f"its wrapper of {hook} failed around {source}: {error_text(failure)}"
                        )
                        self._faults.append(_fault(self._plugins[id(wrapper)][1], reason, failure))
                    for thing in things:
                        with self._costing(source, f"{hook} failed"):
                            add(thing, source)

    def _add_kernel(self, brought: Any, source: Source) -> None:
        kernel = CheckedKernel(brought, source)
        if (other := self._kernels.get(kernel.name)) is not None:
            raise PluginError(f"kernel {kernel.name!r} is already registered by {other.source}")
        self._kernels[kernel.name] = kernel

    def _add_epilogue(self, epilogue: Any, source: Source) -> None:
        if not issubclass(type(epilogue), Epilogue):
            raise PluginError(f"tmm_epilogues must return Epilogue objects, got {shown(epilogue)}")
        if not is_name(epilogue.name):
            raise PluginError(f"an epilogue's name is {shown(epilogue.name)}, not {A_NAME}")
        try:
            epilogue.check_types()
        except TypeError as error:
            raise PluginError(error_message(error)) from error
        if type(given := epilogue.parameters) is not tuple or {*map(type, given)} - {float}:
            raise PluginError(f"epilogue {epilogue.name!r}: parameters is a tuple of numbers")
        if (other := self._epilogues.get(epilogue.name)) is not None:
            raise PluginError(f"epilogue {epilogue.name!r} is already registered by {other[1]}")
        self._epilogues[epilogue.name] = (epilogue, source)

    def _add_format(self, form: Any, source: Source) -> None:
        """Formats belong to the process, not to a registry: their tensors outlive it."""
        if type(form) is not Format:
            raise PluginError(f"tmm_formats must return Format objects, got {shown(form)}")
        if not is_name(form.name):
            raise PluginError(f"a format's name is {shown(form.name)}, not {A_NAME}")
        try:
            form.check()
            code = format_code(form)
            formats.add(form)
            formats.CODES[form.name] = code
        except (TypeError, ValueError) as error:
            raise PluginError(error_message(error)) from error

    # -- queries ---------------------------------------------------------------------

    def kernels(self) -> list[CheckedKernel]:
        """All kernels in use, by name."""
        self.load()
        return [self._kernels[name] for name in sorted(self._kernels)]

    def faults(self) -> list[Fault]:
        """The plugins, kernels and epilogues that are not used, with reasons."""
        self.load()
        return list(self._faults)

    def kernel(self, name: str) -> Kernel[Any]:
        """The kernel of this name.

        Raises:
            UnknownNameError: It is not registered.
            PluginError: Its plugin failed; caused by that failure.
        """
        if name == BASELINE:
            self._add_baseline()
        else:
            self.load()
        if name in self._kernels:
            return self._kernels[name]
        for fault in self._faults:
            if fault.source.plugin == name.partition(".")[0]:
                raise PluginError(f"kernel {name!r}: {fault}") from fault.error
        raise UnknownNameError("kernel", name, self._kernels)

    def unknown_names(self, settings: Settings) -> list[str]:
        """A message for each name in ``TMM_PLUGINS``, ``TMM_DISABLE_PLUGINS`` and ``TMM_DISABLE``
        that nothing installed has. A forced kernel's name raises."""
        return [
            f"{where}: {unknown}"
            for where, kind, given in (
                ("TMM_PLUGINS", "plugin", self._allow or frozenset()),
                ("TMM_DISABLE_PLUGINS", "plugin", self._deny),
                ("TMM_DISABLE or override(disable=…)", "kernel", settings.disable - {POINTWISE}),
            )
            for unknown in self.unknown(kind, given)
        ]

    def unknown(self, kind: str, given: frozenset[str]) -> list[UnknownNameError]:
        """An error for each given name of a ``kind``, ``"kernel"`` or ``"plugin"``, that nothing
        installed has."""
        self.load()
        known, unused = {*self._installed, BASELINE}, set()
        if kind == "kernel":
            known = set(self._kernels)
            # A plugin that is not in use may have a kernel of that name.
            unused = {fault.source.plugin for fault in self._faults}
        return [
            UnknownNameError(kind, name, known)
            for name in sorted(given - known)
            if name.partition(".")[0] not in unused
        ]

    def epilogues(self) -> dict[str, Epilogue]:
        """All epilogues by name, built-in and registered."""
        self.load()
        return {name: epilogue for name, (epilogue, _) in self._epilogues.items()}

    def epilogue(self, text: EpilogueLike) -> Epilogue:
        """Parse a caller's ``epilogue=``; see :func:`tmm_core.epilogues.parse`."""
        if text is None:
            return IDENTITY
        if isinstance(text, str) and (known := INTERNED.get(text)):
            return known
        return parse(text, self.epilogues())

    def reasons_against(
        self, kernel: Kernel[Any], problem: Problem, settings: Settings
    ) -> list[str]:
        """Why ``kernel`` is not a candidate: its own reasons, requirements of the call that its
        traits do not meet, and the settings."""
        reasons = ["disabled by TMM_DISABLE or override"] if kernel.name in settings.disable else []
        required = (
            (problem.deterministic, kernel.traits.deterministic, "deterministic"),
            (problem.batch_invariant, kernel.traits.batch_invariant, "batch-invariant"),
            (problem.capturing, kernel.traits.capture_safe, "safe under graph capture"),
        )
        reasons += [f"not {what}" for wanted, has, what in required if wanted and not has]
        return reasons + kernel.reasons_against(problem)

    def candidates(
        self, problem: Problem, settings: Settings
    ) -> tuple[list[Kernel[Any]], dict[str, list[str]]]:
        """Kernels that can serve ``problem``, and the others' reasons by name."""
        able: list[Kernel[Any]] = []
        rejected: dict[str, list[str]] = {}
        for kernel in self.kernels():
            if reasons := self.reasons_against(kernel, problem, settings):
                rejected[kernel.name] = reasons
            else:
                able.append(kernel)
        return able, rejected


def _fault(source: Source, reason: str, error: BaseException | None) -> Fault:
    """A fault that an exception caused, which the registry keeps as long as the process lives."""
    if error is None:
        return Fault(source, reason)
    place = foreign_place(error)
    drop_frames(error)
    return Fault(source, reason, error, place)


def _blas() -> Kernel[Any]:
    from tmm_blas.blas import Blas  # imported at the first call

    return Blas()


def _installed() -> list[importlib.metadata.EntryPoint]:
    return list(importlib.metadata.entry_points(group=GROUP))
