"""The subcommands of ``tmm``: one module each, with a function that runs it."""
