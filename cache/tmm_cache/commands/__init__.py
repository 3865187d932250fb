"""The commands of `tmm-cache`; each takes the store and its parsed options, and returns the exit
status."""
