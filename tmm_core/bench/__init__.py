"""Measure what the registry chooses against what users would have called, side by side.

``suites`` says which problems, ``providers`` what is timed on each, ``runner`` times it,
``floor`` and ``host`` measure the two limits (memory bandwidth, host cost per call),
``results`` is the file they share, ``report`` and ``plots`` show it.
"""
