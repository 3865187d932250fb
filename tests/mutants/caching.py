"""Mutants of the cache and of the commands: ownership of files, limits, and output."""

from __future__ import annotations

from mutant import Mutant

FUZZ = "tests/cache/test_cache_fuzz.py"
PROCESSES = "tests/cache/test_cache_processes.py"
OWNERSHIP = "tests/cache/test_cache_ownership.py"
LIMITS = "tests/cache/test_cache_limits.py"
UPKEEP = "tests/cache/test_cache_upkeep.py"
BOUNDARIES = "tests/cache/test_cache_boundaries.py"
TRANSPORT = "tests/cache/test_cache_transport.py"
MESSAGES = "tests/cache/test_cache_messages.py"
CONSOLE = "tests/cache/test_cache_console.py"
REMOVAL = "tests/cache/test_cache_removal.py"
CLI = "tests/core/test_cli.py"

CACHE = [
    Mutant("cache-problems-unchecked", "tmm_cache/record.py",
           "    fields.require_sizes(headed.problem)\n", "",
           "a damaged size ends a first miss", ("tests/cache/test_cache_summaries.py",)),
    Mutant("cache-problems-held", "tmm_cache/store.py", "replace(each, record=each.record.problem)", "each",
           "a record that no disk could take has no problem for neighbours", ("tests/cache/test_cache_summaries.py",)),
    Mutant("cache-unwritten-lost", "tmm_cache/store.py", "        self._write_again()\n", "",
           "records that a full disk refused are lost although it has space again", ("tests/cache/test_cache_faults.py",)),
    Mutant("cache-unwritten-late", "tmm_cache/store.py", "        self._unwritten.pop(saved.path, None)\n", "",
           "a record that was written late is written by each further load", ("tests/cache/test_cache_faults.py",)),
    Mutant("cache-unwritten-held", "tmm_cache/store.py", "self._unwritten[saved.path] = saved",
           "self._unwritten[saved.path] = self._held[saved.path] = saved",
           "a record that was written late hides the newer record of another process", ("tests/cache/test_cache_faults.py",)),
    Mutant("cache-unwritten-first", "tmm_cache/store.py", "self._held.get(path) or self._unwritten.get(path)",
           "self._unwritten.get(path)",
           "a record that a process holds is replaced by one on the disk", ("tests/cache/test_cache_faults.py",)),
    Mutant("cache-owner-group", "tmm_cache/ownership.py", "stat.S_IWGRP | stat.S_IWOTH", "stat.S_IWOTH",
           "a member of the group forges records", (OWNERSHIP,)),
    Mutant("cache-owner-file", "tmm_cache/ownership.py",
           "    if (reason := foreign_status(opened)) is not None:\n        return f\"{path} {reason}\"\n", "",
           "another user's file in one's own folder is trusted", (OWNERSHIP,)),
    Mutant("cache-owner-root-alone", "tmm_cache/ownership.py", "if place != path:", "if False:",
           "folders below the root are not opened", (OWNERSHIP,)),
    Mutant("cache-owner-link", "tmm_cache/ownership.py", "if stat.S_ISLNK(found.st_mode):", "if False:",
           "a link leads to folders that nobody checks", (OWNERSHIP,)),
    Mutant("cache-owner-exchanged", "tmm_cache/ownership.py",
           "return None if os.path.samestat(found, opened) else \"\"", "return None",
           "a root exchanged during the read is trusted", (OWNERSHIP,)),
    Mutant("cache-owner-late-root", "tmm_cache/fault_warnings.py", "if (reason := foreign(self._root)) is None:", "if True:",
           "a root that another user made meanwhile is written", (OWNERSHIP,)),
    Mutant("cache-owner-notes", "tmm_cache/notes.py", " if self.foreign is None else b\"\"", "",
           "a forged note passes a kernel as verified", (OWNERSHIP,)),
    Mutant("cache-infinite", "tmm_cache/fields.py", "Annotated[float, Meta(ge=0, le=_FLOAT_MAX)]", "Annotated[float, Meta(ge=0)]",
           "an infinite time is stored", (f"{BOUNDARIES}::test_types_accept_up_to_their_limits",)),
    Mutant("cache-unprintable", "tmm_cache/record.py", "        fields.require_printable(texts)", "        pass",
           "a kernel's name gives orders to a terminal", (f"{BOUNDARIES}::test_a_candidate_prints_nothing_that_a_terminal_obeys",)),
    Mutant("cache-damaged-miss", "tmm_cache/store.py", "if self._locate(**each)[0] is None:", "if True:",
           "a damaged note ends `tmm misses`", (f"{FUZZ}::test_a_damaged_note_of_a_miss_costs_itself",)),
    Mutant("cache-lock-interrupted", "tmm_cache/locks.py", "        lock.release(force=True)", "        pass",
           "an interrupted call keeps others from tuning its problem", (f"{PROCESSES}::test_a_lock_that_an_exception_interrupts_is_free",)),
    Mutant("cache-future-use", "tmm_cache/disk.py", "if abs(time.time() - os.stat(path).st_mtime) > TOUCH",
           "if time.time() - os.stat(path).st_mtime > TOUCH", "a time yet to come is never mended", (LIMITS,)),
    Mutant("cache-kept-by-clock", "tmm_cache/size_limits.py", "recent = abs(now_ns - file.used_ns)", "recent = now_ns - file.used_ns",
           "a record that was written under another clock stays beyond the limit", (UPKEEP,)),
    Mutant("transport-checksum", "tmm_cache/transport.py",
           "decoded(unsealed(data, required=True), _Document)", "decoded(data, _Document)",
           "a file that changed on its way is imported", (TRANSPORT,)),
    Mutant("transport-bomb", "tmm_cache/transport.py", "stream.read(MAX_BYTES + 1)", "stream.read()",
           "a file of a megabyte takes gigabytes of memory", (TRANSPORT,)),
    Mutant("transport-torn", "tmm_cache/transport.py", "zlib.error, EOFError)", "zlib.error)",
           "a file that was cut off ends the command with a traceback", (TRANSPORT,)),
    Mutant("transport-future", "tmm_cache/transport.py", "elif record.created_at > latest:", "elif False:",
           "a record of the future wins over all that are tuned", (TRANSPORT,)),
    Mutant("transport-unread", "tmm_cache/transport.py", "if unread and not unread[0].damaged:", "if False:",
           "a record that cannot be read this time is replaced", (TRANSPORT,)),
    Mutant("transport-limit", "tmm_cache/transport.py", "if len(data) > MAX_BYTES:\n        raise UsageError", "if False:\n        raise UsageError",
           "an export is written that no import reads", (TRANSPORT,)),
    Mutant("cache-short-write", "tmm_cache/disk.py", "rest = rest[os.write(handle, rest) :]",
           "os.write(handle, rest)\n                rest = rest[len(rest) :]", "a short write tears a record", (LIMITS,)),
    Mutant("cache-append-most", "tmm_cache/disk.py", "st_size + 1 + len(line) > most", "st_size + len(line) > most",
           "a log grows beyond its limit, and is not read any more", (LIMITS,)),
    Mutant("cache-config-subclass", "tmm_cache/fields.py", "type(name) is not str or not scalar", "not scalar", "a plugin's text is kept as it is",
           (f"{BOUNDARIES}::test_a_config_is_a_few_printable_scalars",)),
    Mutant("cache-empty-digest", "tmm_cache/commands/clear.py", "    if options.record is None:", "    if not options.record:",
           "clear with an empty digest removes everything", ("tests/cache/test_cache_cli.py",)),
    Mutant("cache-export-link", "tmm_cache/disk.py", "write_atomically(file.resolve(), data, mode=0o666)",
           "write_atomically(file, data, mode=0o666)", "an export replaces the link and not its target", (LIMITS,)),
    Mutant("cache-target", "tmm_cache/disk.py", "        if not target.parent.is_dir():", "        if False:",
           "an export to a missing folder names a temporary file", (MESSAGES,)),
    Mutant("cache-streams", "tmm_base/console.py", "    _open_standard_streams()\n    try:", "    try:",
           "a command with stdout closed ends in a traceback", (MESSAGES,)),
    Mutant("cache-table-words", "tmm_base/console.py", "for least in (words, [1] * len(words)):", "for least in ([1] * len(words),):",
           "a table breaks words", (CONSOLE,)),
    Mutant("cache-empty-field", "tmm_cache/problem_fields.py", 'for name, value in values.items() if value != ""]',
           "for name, value in values.items()]", "a field that is off prints as `early=`", (MESSAGES,)),
    Mutant("cache-variable", "tools/commands/variables.py", "            CHECKS.get(name, str)(text)\n", "",
           "TMM_CACHE_MAX_SIZE=lots passes doctor", (CLI,)),
    Mutant("cache-doctor-owner", "tools/commands/doctor.py", "        yield Finding(\"cache\", \"problem\", text, advice)\n    for layer",
           "        pass\n    for layer", "doctor does not tell of records that others can write", (CLI,)),
    Mutant("cache-front", "tmm_base/tmm.py", 'in (*COMMANDS, "--"):', 'in (*COMMANDS, "--", "--version"):',
           "tmm --version imports torch", (MESSAGES,)),
    Mutant("cache-cleared-folder", "tmm_cache/disk.py", "with suppress(FileNotFoundError, FileExistsError):",
           "with suppress(FileExistsError):", "a `clear` at the same time costs a miss or a lock, with a warning", (REMOVAL,)),
    Mutant("cache-cleared-lock", "tmm_cache/store.py", "lock = repeated(acquired)", "lock = acquired()",
           "a `clear` at the same time costs a lock, with a warning", (REMOVAL,)),
]  # fmt: skip
