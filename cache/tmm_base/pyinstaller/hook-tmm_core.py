"""Modules and files that PyInstaller cannot find by reading ``import`` statements.

Epilogues, formats and kernels are found by listing folders and by entry points. Triton compiles the
source of modules, so their files are included.
"""

from __future__ import annotations

from PyInstaller.utils.hooks import collect_data_files, collect_submodules, copy_metadata

_PACKAGES = ["tmm_core", "tmm_base", "tmm_blas", "tmm_cache", "tmm_triton"]

#: Applications need neither.
_UNUSED = ("tmm_core.testing", "tmm_core.bench")
hiddenimports = [
    module
    for package in _PACKAGES
    for module in collect_submodules(package, on_error="ignore")
    if not module.startswith(_UNUSED)
]
datas = copy_metadata("tmm-core") + collect_data_files("tmm_core")
module_collection_mode = dict.fromkeys(_PACKAGES, "pyz+py")
