"""The code that `tmm_core` and `tmm_cache` share: guards around other people's code, the console of
both commands, and the start of `tmm`.

It imports the standard library alone: `tmm --version` starts in a moment, and the cache needs no
torch.
"""


class UsageError(Exception):
    """A mistake in how a command is used: reported in one line, exit status 2."""
