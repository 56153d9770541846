"""Subcommands of ``python -m jax_fa4``: each module has ``add_parser(subparsers)`` and ``run(arguments) -> int``."""
