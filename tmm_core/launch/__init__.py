"""Launches a choice: checks, folds, plans and the warm path."""
