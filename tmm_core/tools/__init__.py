"""The ``tmm`` command, the demo, and tuning divided among ranks."""
