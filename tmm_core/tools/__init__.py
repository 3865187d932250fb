"""The ``tmm`` command, the demo, and distributed tuning."""
