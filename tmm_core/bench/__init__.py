"""Benchmarks: the registry's choice against the eager code it replaces, in one loop.

``suites`` defines the problems, and ``providers`` and ``grouped_baselines`` the columns to time on
each. ``runner`` times the columns, ``exhaustive`` searches for candidates that a tuning missed, and
``host`` measures the host's cost per call. ``results`` reads and writes the shared file, ``report``
presents it, and ``quick`` prints the README's table.
"""
