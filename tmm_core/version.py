"""The version of tmm, in a module below everything that stamps or prints it."""

from typing import Final

__version__: Final = "0.1.0"
