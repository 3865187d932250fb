"""Benchmarks: the registry's choice against the eager code it replaces, side by side.

``suites`` defines the problems, ``providers`` the columns to time on each, ``runner`` times them,
``floor`` and ``host`` measure the two limits (memory bandwidth, host cost per call),
``results`` reads and writes the shared file, ``report`` and ``plots`` present it.
"""
