"""Describes the toolchain: what Triton needs of this machine to compile, load and launch a kernel.

Its fingerprint changes when a part is repaired, replaced or broken. It is read each time, without
importing Triton (0.3 ms), and only if some candidate could not be tried.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import os
import shutil
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tmm_base.guards import suppress
from tmm_cache import stamp

from tmm_core.errors import reraise
from tmm_core.spec.device import triton_version

if TYPE_CHECKING:
    from tmm_cache import JSON

#: Space below which a disk counts as full: a compiled kernel takes some 200 kB, a linker more.
LEAST_FREE_BYTES = 16 * 2**20

#: Triton's files that decide whether it compiles, besides its programs.
_BACKENDS = ("backends/nvidia", "backends/amd")
_FILES = (
    *("__init__.py", "knobs.py", "_C/libtriton.so", "compiler/compiler.py"),
    *(f"{backend}/{name}.py" for backend in _BACKENDS for name in ("compiler", "driver")),
)
#: Variables that name a folder for output. They often differ from process to process.
_OUTPUTS = ("TRITON_CACHE_DIR", "TRITON_DUMP_DIR", "TRITON_OVERRIDE_DIR", "TRITON_HOME")
#: Variables that name the folder for temporary files, of Python and of compilers.
_TEMPORARY = ("TMPDIR", "TMP", "TEMP")
#: Other variables by which Triton finds programs and libraries, and options of ptxas.
_VARIABLES = (
    "CC", "CUDA_HOME", "CUDA_PATH", "LD_LIBRARY_PATH", "LIBRARY_PATH", "CPATH", "C_INCLUDE_PATH",
    "PTXAS_OPTIONS", "DISABLE_PTXAS_OPT",
)  # fmt: skip
_C_HEADER = Path("/usr/include/stdlib.h")
_DRIVER = Path("/proc/driver/nvidia/version")


def fingerprint() -> str:
    """Return a digest of :func:`toolchain`."""
    text = json.dumps(toolchain(), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def toolchain() -> dict[str, JSON]:
    """Return the present state of the toolchain's parts, by name; of a file its size and times."""
    return {
        "triton": _version(),
        "python.h": os.path.exists(python_header()),
        "driver": _read(_DRIVER),
        "files": stamp([*_triton_files(), *_programs(), *_site_packages()]),
        "variables": _variables(),
        "folders": {
            name: state for name, path in folders().items() if (state := usable(path)) != "yes"
        },
    }


def lacking() -> str | None:
    """Return what this machine lacks to build Triton's launcher; None if it lacks nothing."""
    if c_compiler() is None:
        named = os.environ.get("CC", "gcc or clang") or "CC, which is empty,"
        return f"Triton needs a C compiler ({named} not found)"
    header = python_header()
    return None if os.path.exists(header) else f"Triton needs Python.h (no {header})"


def ptxas() -> Path | None:
    """Return the path of the assembler that Triton runs; None if there is none."""
    given = os.environ.get("TRITON_PTXAS_PATH")
    if given and os.path.exists(given):
        return Path(given)
    top = _triton()
    own = None if top is None else top / "backends" / "nvidia" / "bin" / "ptxas"
    return own if own is not None and os.path.exists(own) else None


def c_compiler() -> Path | None:
    """Return the C compiler that builds Triton's launcher; None if there is none."""
    given = os.environ.get("CC")
    # Triton runs an empty CC, too.
    found = shutil.which("gcc") or shutil.which("clang") if given is None else shutil.which(given)
    return None if found is None else Path(found)


def python_header() -> Path:
    """Return the path at which ``Python.h`` has to be."""
    # Debian's default scheme points to /usr/local, which has no headers.
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")
    return Path(sysconfig.get_paths(scheme)["include"], "Python.h")


def _programs() -> list[str | Path]:
    """Return the programs that compile, and a header of C: Debian's gcc installs without any."""
    found = ptxas(), c_compiler(), *map(shutil.which, ("as", "ld")), _C_HEADER
    return [path for path in found if path is not None]


def folders() -> dict[str, Path | None]:
    """The folders that Triton and its compiler write into; None for a variable that names none."""
    found: dict[str, Path | None] = {}
    with suppress(OSError):  # none is usable
        found["temporary"] = Path(tempfile.gettempdir())
    # Python falls back to another folder where a compiler insists on this one.
    found |= {name: Path(given) for name in _TEMPORARY if (given := os.environ.get(name))}
    given = os.environ.get("TRITON_CACHE_DIR")
    # As Triton: an empty TRITON_HOME, or a home that is unknown, is the working directory.
    home = os.environ.get("TRITON_HOME", os.path.expanduser("~/"))
    found["triton cache"] = Path(given) if given else Path(home, ".triton", "cache")
    if given == "":  # Triton does not fall back to its default then
        found["triton cache"] = None
    return found


def usable(folder: Path | None) -> str:
    """Return ``yes``, or the reason why a folder, which need not exist yet, cannot be written."""
    if folder is None:
        return "unnamed (TRITON_CACHE_DIR is empty)"
    try:
        str(folder).encode()
    except UnicodeEncodeError as error:
        reraise(error)
        return "not named in UTF-8"
    place = folder
    try:
        while not _exists(place) and place != place.parent:
            place = place.parent
        if not os.access(place, os.W_OK | os.X_OK):
            return "not writable"
        free = shutil.disk_usage(place).free
    except OSError as error:
        reraise(error)
        return error.strerror or "unreadable"
    return "yes" if free >= LEAST_FREE_BYTES else "full"


def _exists(path: Path) -> bool:
    """Whether there is such a file. Raises OSError for a path that cannot become one, such as one
    with too long a name."""
    with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
        os.stat(path)
        return True
    return False


#: Read once: the process has imported this release, and reading takes 1 ms.
_version = functools.cache(triton_version)


def _triton() -> Path | None:
    """Triton's folder."""
    with suppress(ImportError, ValueError):
        found = importlib.util.find_spec("triton")
        return Path(found.origin).parent if found is not None and found.origin else None
    return None


def _triton_files() -> list[Path]:
    top = _triton()
    if top is None:
        return []
    programs = [path for backend in _BACKENDS for path in sorted((top / backend / "bin").glob("*"))]
    return [*(top / name for name in _FILES), *programs]


def _site_packages() -> list[str]:
    """Return the folders whose times change when a package is installed or removed."""
    paths = sysconfig.get_paths()
    found = {paths["purelib"], paths["platlib"]}
    found |= {path for path in sys.path if path.endswith(("site-packages", "dist-packages"))}
    return sorted(found)


def _variables() -> dict[str, JSON]:
    """Return the variables that decide what Triton uses, with the file of each that is a path."""
    found: dict[str, JSON] = {}
    for name, value in sorted(os.environ.items()):
        if name in _OUTPUTS or not (name.startswith("TRITON_") or name in _VARIABLES):
            continue
        found[name] = stamp([value]) if os.path.isabs(value) else value
    return found


def _read(path: Path) -> str:
    with suppress(OSError):
        return path.read_text(errors="replace")[:500]
    return ""


def forget_programs() -> None:
    """Make Triton look for its programs again, if it is imported. It also caches that a program was
    missing."""
    knobs: Any = sys.modules.get("triton.knobs")
    compiler: Any = sys.modules.get("triton.backends.nvidia.compiler")
    with suppress(AttributeError):  # not imported, or another release
        knobs.NvidiaTool.from_path.cache_clear()
    with suppress(AttributeError):
        compiler.get_ptxas_version.cache_clear()
