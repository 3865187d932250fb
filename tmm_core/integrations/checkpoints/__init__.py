"""Weights of quantised checkpoints as :class:`tmm_core.Quantized`, a file for each layout.

Each file has ``read``, which ``Quantized.from_…`` calls. Where tensors are repacked, it also has
``written``, which restores them for a ``state_dict``. Layouts are recognised by their tensors; no
other package is imported.
"""
