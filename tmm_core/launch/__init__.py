"""How a choice is launched, and launched again: checks, folds, plans, the path of a warm call."""
