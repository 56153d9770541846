"""``python -m jax_fa4``: one subcommand for each module of :mod:`jax_fa4.cli`."""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import sys
from collections.abc import Sequence

import jax_fa4.cli


def make_parser() -> argparse.ArgumentParser:
    """The parser with every subcommand; parsed arguments carry ``run``, a function from them to the exit status."""
    parser = argparse.ArgumentParser(prog="python -m jax_fa4", description="FlashAttention-4 for JAX")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for name in sorted(module.name for module in pkgutil.iter_modules(jax_fa4.cli.__path__)):
        importlib.import_module(f"jax_fa4.cli.{name}").add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a subcommand and returns its exit status."""
    arguments = make_parser().parse_args(argv)
    return arguments.run(arguments)


if __name__ == "__main__":
    sys.exit(main())
