"""The subcommands of ``tmm``: one module each, of a function that runs it."""
