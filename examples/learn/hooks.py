"""How tmm calls a plugin's hooks; see docs/learn.md."""

import tmm_core
from tmm_core import hookimpl
from tmm_core.registry.registry import Registry


class Forgetful:
    def tmm_kernels(self):  # not marked as a hook
        return []


class Brings:
    @hookimpl
    def tmm_epilogues(self):
        return [tmm_core.Epilogue(name, lambda z: z) for name in ("mine", "theirs")]


class Drops:
    """Wraps the results of all other plugins."""

    @hookimpl(wrapper=True)
    def tmm_epilogues(self):
        brought = yield
        return [[each for each in some if each.name != "theirs"] for some in brought]


try:
    Registry().register(Forgetful())
except tmm_core.PluginError as error:
    print(error)

registry = Registry()
registry.hooks.manager.add_hookcall_monitoring(
    lambda hook, implementations, arguments: print("called", hook),
    lambda outcome, hook, implementations, arguments: None,
)
registry.register(Drops())
registry.register(Brings())
print("mine" in registry.epilogues(), "theirs" in registry.epilogues())
