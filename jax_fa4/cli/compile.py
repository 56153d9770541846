"""``python -m jax_fa4 compile``: compiles kernels ahead of time; needs nvidia-cutlass-dsl, no GPU."""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from jax_fa4.kernels import compile as compiler
from jax_fa4.kernels import store
from jax_fa4.kernels.spec import ARCHITECTURES, KINDS, KernelSpec, UnsupportedSpecError, standard_specs


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Adds the ``compile`` subcommand; its ``run`` default is :func:`run`."""
    parser = subparsers.add_parser("compile", help="compile kernels ahead of time (no GPU needed)")
    parser.add_argument("--arch", default=",".join(ARCHITECTURES), help="comma-separated: %(default)s (default all)")
    parser.add_argument("--only", choices=("forward", "backward"), help="compile only this direction's kernels")
    parser.add_argument("--match", default="", metavar="TEXT", help="only kernels whose name contains TEXT")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder to write to (default: the user's cache)")
    parser.add_argument("--jobs", type=int, default=1, help="compilers to run at the same time (default %(default)s)")
    parser.add_argument("--force", action="store_true", help="compile again what is there already")
    parser.add_argument("--prune", action="store_true", help="delete from DIR the artefacts that no release would have")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Compiles the standard set; returns 0, or 1 if a kernel failed, or 2 for arguments that cannot be served."""
    archs = [arch.strip() for arch in arguments.arch.split(",") if arch.strip()]
    kinds = [kind for kind in KINDS if arguments.only is None or kind.startswith(arguments.only)]
    try:
        specs = [spec for spec in standard_specs(archs, kinds) if arguments.match in spec.name]
    except UnsupportedSpecError as error:
        print(f"jax_fa4 compile: {error}", file=sys.stderr)
        return 2
    if not specs:
        print("jax_fa4 compile: no kernel of the standard set matches these arguments", file=sys.stderr)
        return 2
    if arguments.prune and arguments.out is None:
        print("jax_fa4 compile: --prune needs --out", file=sys.stderr)
        return 2
    if compiler.dsl_version() is None:
        print(f"jax_fa4 compile: needs {compiler.DSL_DISTRIBUTION}: pip install 'jax-fa4[compile]'", file=sys.stderr)
        return 2
    folder = arguments.out if arguments.out is not None else store.default_cache()
    failures = compile_all(specs, folder, jobs=max(1, arguments.jobs), force=arguments.force)
    for spec, failure in failures:
        print(f"{spec.name}: {failure}", file=sys.stderr)
    print(f"{len(specs) - len(failures)} of {len(specs)} kernels in {folder}")
    if arguments.prune:
        print(f"{prune(folder)} other artefacts deleted")
    return 1 if failures else 0


def prune(folder: Path) -> int:
    """Deletes the artefacts in ``folder`` that are not of the standard set, these kernel sources and the installed
    compiler; returns how many."""
    version = compiler.dsl_version()
    assert version is not None
    wanted = {store.artefact_filename(spec, version) for spec in standard_specs(ARCHITECTURES)}
    others = [path for path in folder.glob(f"*{store.SUFFIX}") if path.name not in wanted]
    for path in others:
        path.unlink()
    return len(others)


def compile_all(specs: list[KernelSpec], folder: Path, *, jobs: int, force: bool) -> list[tuple[KernelSpec, Exception]]:
    """Compiles ``specs`` into ``folder`` behind a progress bar; returns what failed, with the error."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    failures: list[tuple[KernelSpec, Exception]] = []
    columns = (
        TextColumn("compile"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns) as progress, ThreadPoolExecutor(jobs) as pool:
        task = progress.add_task("", total=len(specs))
        futures = {pool.submit(store.make, spec, folder, force=force): spec for spec in specs}
        for future in as_completed(futures):
            spec = futures[future]
            try:
                future.result()
            except Exception as error:
                failures.append((spec, error))
            progress.update(task, advance=1, description=spec.name)
    return failures
