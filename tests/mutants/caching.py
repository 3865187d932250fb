"""Mutants of the cache and of the commands: whose files these are, limits, and what is printed."""

from __future__ import annotations

from mutant import Mutant

OWNERSHIP = "tests/cache/test_cache_ownership.py"
FORGED = "tests/core/test_forged.py"
LIMITS = "tests/cache/test_cache_limits.py"
MESSAGES = "tests/cache/test_cache_messages.py"
COLUMNS = "tests/cache/test_cache_columns.py"
CLI = "tests/core/test_cli.py"

CACHE = [
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
           "return None if os.path.samestat(found, opened) else REPLACED", "return None",
           "a root exchanged during the read is trusted", (OWNERSHIP,)),
    Mutant("cache-owner-retry", "tmm_cache/files.py", "            if foreign != REPLACED:\n                break",
           "            break", "a record that was just saved again is verified again", (OWNERSHIP,)),
    Mutant("cache-owner-late-root", "tmm_cache/complaints.py", "return foreign(self._root) is None", "return True",
           "a root that another user made meanwhile is written", (OWNERSHIP,)),
    Mutant("cache-owner-notes", "tmm_cache/notes.py", "        if read.foreign is not None:\n", "        if False:\n",
           "a forged note passes a kernel as verified", (OWNERSHIP,)),
    Mutant("cache-owner-ignored", "tmm_cache/store.py", "                    mine = False\n", "                    pass\n",
           "a forged record is used unverified", (FORGED,)),
    Mutant("cache-completed-saved", "tmm_cache/store.py", "imported=not verified", "imported=False",
           "completing a forged record makes it trusted", (FORGED,)),
    Mutant("cache-completed-held", "tmm_cache/store.py", "own=path not in self._unverified", "own=True",
           "the same, where the disk refuses", (FORGED,)),
    Mutant("cache-future-use", "tmm_cache/ages.py", "if abs(time.time() - os.stat(path).st_mtime) > TOUCH",
           "if time.time() - os.stat(path).st_mtime > TOUCH", "a time yet to come is never mended", (LIMITS,)),
    Mutant("cache-never-used", "tmm_cache/ages.py", "_NEVER_USED: Final = 365 * 86400.0", "_NEVER_USED: Final = 0.0",
           "an imported record counts as used in 1970", (LIMITS,)),
    Mutant("cache-age-of-link", "tmm_cache/ages.py", "follow_symlinks=False", "follow_symlinks=True",
           "a young link to an old file is removed", (LIMITS,)),
    Mutant("cache-short-write", "tmm_cache/disk.py", "rest = rest[os.write(handle, rest) :]",
           "os.write(handle, rest)\n                rest = rest[len(rest) :]", "a short write tears a record", (LIMITS,)),
    Mutant("cache-append-most", "tmm_cache/disk.py", "st_size + 1 + len(line) > most", "st_size + len(line) > most",
           "a log grows beyond its limit, and is not read any more", (LIMITS,)),
    Mutant("cache-head-limit", "tmm_cache/head.py", "HEAD_BYTES: Final = 4096", "HEAD_BYTES: Final = 1024",
           "lists read every record in full", (LIMITS,)),
    Mutant("cache-nearest-ratio", "tmm_cache/nearest.py", "return abs(math.log2(asked / there))",
           "return abs(asked - there)", "the nearest key is one of another dtype", (LIMITS,)),
    Mutant("cache-prune-tie", "tmm_cache/removal.py", "claimed[folder] <= latest", "claimed[folder] < latest",
           "an environment as old as the newest stays", (LIMITS,)),
    Mutant("cache-prune-used", "tmm_cache/removal.py", "return min(entry.head.created_at, written)", "return written",
           "a use today makes an old environment the newest", (LIMITS,)),
    Mutant("cache-empty-filter", "tmm_cache/filters.py", "return self == Filter()",
           "return self == Filter(before=self.before, after=self.after)", "clear --older-than removes everything",
           (LIMITS,)),
    Mutant("cache-export-link", "tmm_cache/disk.py", "write_atomically(file.resolve(), data, mode=0o666)",
           "write_atomically(file, data, mode=0o666)", "an export replaces the link and not its target", (LIMITS,)),
    Mutant("cache-target", "tmm_cache/disk.py", "        if not target.parent.is_dir():", "        if False:",
           "an export to a missing folder names a temporary file", (MESSAGES,)),
    Mutant("cache-streams", "tmm_cache/console.py", "    _open_standard_streams()\n    try:", "    try:",
           "a command with stdout closed ends in a traceback", (MESSAGES,)),
    Mutant("cache-diff-heads", "tmm_cache/deployment.py", "found = _summaries(source, noted, full=True)",
           "found = _summaries(source, noted)", "a stale head is a difference", (MESSAGES,)),
    Mutant("cache-table-below", "tmm_cache/columns.py", "> width and len(least) > 1:", "> 2 * width and len(least) > 1:",
           "a table breaks words", (COLUMNS,)),
    Mutant("cache-empty-field", "tmm_cache/facets.py", 'for name, value in values.items() if value != ""]',
           "for name, value in values.items()]", "a field that is off prints as `early=`", (MESSAGES,)),
    Mutant("cache-variable", "tools/commands/variables.py", "            CHECKS.get(name, str)(text)\n", "",
           "TMM_CACHE_MAX_SIZE=lots passes doctor", (CLI,)),
    Mutant("cache-doctor-owner", "tools/commands/doctor.py", "        yield Finding(\"cache\", \"problem\", text, advice)\n    for layer",
           "        pass\n    for layer", "doctor does not tell of records that others can write", (CLI,)),
    Mutant("cache-front", "tmm_cache/tmm.py", 'in (*COMMANDS, "--"):', 'in (*COMMANDS, "--", "--version"):',
           "tmm --version imports torch", (MESSAGES,)),
]  # fmt: skip
