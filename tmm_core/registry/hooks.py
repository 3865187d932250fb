"""Calls plugins' hooks through pluggy, one plugin at a time: an exception costs only its plugin.
Wrappers, ``tryfirst``, ``trylast`` and call monitoring work as in pluggy."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

import pluggy

from tmm_core.errors import reraise, shown
from tmm_core.spec import hookspecs

#: Hooks, in calling order.
HOOKS = ("tmm_kernels", "tmm_epilogues", "tmm_formats")
#: Maximum number of objects from one plugin; more suggest an endless sequence.
MOST_BROUGHT = 10_000

#: A plugin and the exception of its wrapper.
Failed = tuple[object, BaseException]


class Hooks:
    """The registered plugins and the calls of their hooks."""

    def __init__(self) -> None:
        self.manager = pluggy.PluginManager(hookspecs.PROJECT)
        self.manager.add_hookspecs(hookspecs)
        #: Failed wrappers: the hook and the plugin's id.
        self._left_out: set[tuple[str, int]] = set()

    def register(self, plugin: object, name: str) -> list[str]:
        """Add a plugin; returns its non-fatal faults.

        Raises:
            Exception: It cannot be registered: a hook's signature does not match its spec, its name
                is taken, or it is unhashable.
        """
        hash(plugin)
        self.manager.register(plugin, name=name)
        known = " and ".join(HOOKS)
        found, hooks = list[str](), dict[str, str]()
        for name in dir(plugin):
            if not name.startswith("tmm_"):
                continue
            options = self.manager.parse_hookimpl_opts(plugin, name)
            if options is not None:
                hooks[name] = options.get("specname") or name
            elif inspect.isroutine(inspect.getattr_static(plugin, name)):
                found.append(
                    f"its function {name} lacks @tmm_core.hookimpl: nothing calls it; hooks are "
                    f"{known}"
                )
        if not hooks and not found:
            found.append(f"it is no plugin: {shown(plugin)} has no hooks; hooks are {known}")
        if unknown := [name for name, hook in hooks.items() if hook not in HOOKS]:
            found.append(f"implements unknown hooks {unknown}; hooks are {known}")
        return found

    def in_order(self, hook: str, plugins: Iterable[object]) -> list[object]:
        """The ``plugins`` that implement ``hook``: ``tryfirst`` first, ``trylast`` last, the
        others in the given order."""
        ranks: dict[int, int] = {}
        for impl in self._implementations(hook):  # pluggy lists ``tryfirst`` last
            if not _wraps(impl):
                ranks[id(impl.plugin)] = int(impl.trylast) - int(impl.tryfirst)
        implementing = [plugin for plugin in plugins if id(plugin) in ranks]
        return sorted(implementing, key=lambda plugin: ranks[id(plugin)])

    def call(self, hook: str, plugin: object) -> tuple[list[Any], list[Failed]]:
        """The result of ``plugin``'s ``hook``, passed through all plugins' wrappers; and the
        failed wrappers, which are left out from then on.

        A wrapper applies to other plugins if its own plugin has no other implementation of that
        hook.

        Raises:
            BaseException: The exception of the plugin's own function.
            TypeError: It did not return a list.
        """
        wrappers = self._wrappers(hook)
        try:
            return self._call(hook, plugin, wrappers), []
        except BaseException as error:
            reraise(error)
            if not wrappers:
                raise
        things = self._call(hook, plugin, ())
        working: list[object] = []
        failed: list[Failed] = []
        for wrapper in wrappers:
            try:
                things = self._call(hook, plugin, [*working, wrapper])
                working.append(wrapper)
            except BaseException as error:
                reraise(error)
                failed.append((wrapper, error))
        self._left_out.update((hook, id(wrapper)) for wrapper, _ in failed)
        return things, failed

    def _call(self, hook: str, plugin: object, wrappers: Sequence[object]) -> list[Any]:
        called = {id(plugin), *map(id, wrappers)}
        others = [i.plugin for i in self._implementations(hook) if id(i.plugin) not in called]
        results = self.manager.subset_hook_caller(hook, others)()
        own = [i for i in self._implementations(hook) if i.plugin is plugin and not _wraps(i)]
        # pluggy drops results that are None.
        if not wrappers and isinstance(results, list) and len(results) < len(own):
            raise TypeError(f"{hook} must return a list, got None")
        things: list[Any] = []
        for brought in results:
            if not isinstance(brought, Sequence) or isinstance(brought, str):
                raise TypeError(f"{hook} must return a list, got {shown(brought)}")
            things += islice(brought, MOST_BROUGHT + 1 - len(things))
        if len(things) > MOST_BROUGHT:
            raise TypeError(f"{hook} returned more than {MOST_BROUGHT} objects")
        return things

    def _wrappers(self, hook: str) -> list[object]:
        """The plugins that have only wrappers of ``hook``."""
        implementations = self._implementations(hook)
        plugins = {id(impl.plugin): impl.plugin for impl in implementations}
        answering = {id(impl.plugin) for impl in implementations if not _wraps(impl)}
        return [
            each
            for key, each in plugins.items()
            if key not in answering and (hook, key) not in self._left_out
        ]

    def _implementations(self, hook: str) -> list[Any]:
        caller: pluggy.HookCaller = getattr(self.manager.hook, hook)
        return caller.get_hookimpls()


def _wraps(impl: Any) -> bool:
    return bool(impl.wrapper or impl.hookwrapper)
