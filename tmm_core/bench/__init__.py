"""Benchmarks: the registry's choice against the eager code it replaces, in one loop.

``suites`` defines the problems, ``providers`` and ``grouped_baselines`` the columns to time on
each. ``runner`` times them, ``exhaustive`` searches for what a tuning missed, and ``host`` measures
the host's cost per call. ``results`` reads and writes the shared file; ``report``
presents it, and ``quick`` prints the README's table.
"""
