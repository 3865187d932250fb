"""Mutants of how plugins' code and users' functions are identified."""

from __future__ import annotations

from mutant import Mutant

CODE = "tests/core/test_code.py"
EDIT = f"{CODE}::test_every_edit_makes_another_version"

IDENTITY = [
    Mutant("code-contents", "spec/code.py", 'found.append(f"{each.name} {content}")',
           "found.append(each.name)", "an edited file leaves the version", (EDIT,)),
    Mutant("code-names", "spec/code.py", 'found.append(f"{each.name} {content}")',
           "found.append(content)", "a renamed file leaves the version",
           (f"{CODE}::test_files_of_the_interpreter_and_of_editors_are_no_part",)),
    Mutant("code-stated", "spec/code.py", 'both = f"{stated}+{files}"', "both = stated",
           "a version that its author forgot to change is trusted", (EDIT,)),
    Mutant("code-bases", "spec/code.py", "for base in kind.__mro__)", "for base in (kind,))",
           "an edited base class leaves the version",
           (f"{CODE}::test_a_base_class_in_another_package_counts",)),
    Mutant("code-times", "spec/code.py", "of.st_size, of.st_mtime_ns, of.st_ctime_ns",
           "of.st_size, 0, 0", "a file is read once and never again",
           (f"{CODE}::test_an_edit_within_one_process_is_read_again",)),
    Mutant("code-typed", "spec/code.py", "_of_process(kinds) if typed or None in files",
           "_of_process(kinds) if None in files",
           "a kernel from a prompt has the version of a file",
           (f"{CODE}::test_a_kernel_without_files_has_a_version_of_its_class",)),
    Mutant("code-process", "spec/code.py", "PROCESS = os.urandom(6).hex()", 'PROCESS = "process"',
           "code of one process is trusted by another",
           (f"{CODE}::test_only_a_kernel_with_files_has_one_version_in_all_processes",)),
    Mutant("code-namespace", "spec/code.py", 'if alone is not None and "." in package and not folders',
           "if False", "an edited module of a folder without __init__.py leaves the version",
           (f"{CODE}::test_a_single_module_is_its_file",)),
    Mutant("hopper-source", "tmm_triton/hopper/config.py", "    SOURCE: str = _SOURCE\n",
           '    SOURCE: str = ""\n', "Triton's cache answers for edited properties",
           ("tests/plugins/test_warp_specialized.py::"
            "test_tritons_cache_key_changes_with_the_code_of_properties",)),
    Mutant("ptx-version", "tmm_triton/naive.py", "acc = tl.zeros", "acc = 1 + tl.zeros",
           "changed machine code keeps its version",
           ("tests/plugins/test_ptx_digests.py::test_changed_machine_code_has_another_version",)),
]  # fmt: skip
