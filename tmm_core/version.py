"""The version of tmm, in a module that every other module may import."""

from typing import Final

__version__: Final = "0.1.0"
