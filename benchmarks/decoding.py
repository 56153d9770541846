"""Short grouped queries on one GPU: the kernel that packs a group's query heads, the plain kernel, cuDNN; microseconds.

    python benchmarks/decoding.py [--out TABLE.md]

Few query rows (decoding, speculative decoding) of many query heads that share key heads, against a long context;
head_dim 128, bfloat16, no mask. Bytes of key and value over time, as TB/s, stand beside the time: reading them once is
what such a call cannot do without.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
from timing import compare

import jax_fa4
from jax_fa4.kernels import store
from jax_fa4.kernels.spec import KernelSpec

HEAD_DIM = 128


@dataclass(frozen=True)
class Cell:
    """One row of the table."""

    batch: int
    rows: int
    heads: int
    key_heads: int
    length: int

    @property
    def bytes(self) -> int:
        """Key and value."""
        return 2 * 2 * self.batch * self.length * self.key_heads * HEAD_DIM


CELLS = (
    Cell(32, 1, 32, 8, 2048),
    Cell(32, 1, 64, 8, 8192),
    Cell(8, 1, 32, 8, 8192),
    Cell(8, 1, 64, 8, 32768),
    Cell(8, 8, 64, 8, 8192),
    Cell(8, 16, 32, 4, 8192),
    Cell(16, 1, 32, 1, 8192),
)


class PlainStore(store.ArtefactStore):
    """The store in use without packed kernels."""

    def missing_reason(self, spec: KernelSpec) -> str | None:
        return "left out by this benchmark" if spec.pack_gqa else super().missing_reason(spec)


def functions(cell: Cell) -> dict[str, Callable[[], object]]:
    """Zero-argument functions of one cell, compiled."""
    keys = jax.random.split(jax.random.key(cell.length), 3)
    shapes = [(cell.batch, cell.rows, cell.heads, HEAD_DIM), *[(cell.batch, cell.length, cell.key_heads, HEAD_DIM)] * 2]
    operands = [jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True)]
    ours = functools.partial(jax_fa4.attention, implementation="fa4")
    cudnn = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
    previous = store.default_store()

    def compiled(function: Callable, kernels: store.ArtefactStore) -> Callable[[], object]:
        store.set_default_store(kernels)
        try:
            # A function of its own: the same one would be taken from JAX's cache, with the kernel chosen before.
            return functools.partial(jax.jit(lambda *x: function(*x)).lower(*operands).compile(), *operands)
        finally:
            store.set_default_store(previous)

    return {
        "packed": compiled(ours, previous),
        "plain": compiled(ours, PlainStore(previous.folder, previous.cache, previous.compile_missing)),
        "cudnn": compiled(cudnn, previous),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="Markdown file to write")
    arguments = parser.parse_args()
    lines = [
        "| batch | rows | heads | key heads | keys | packed, us | TB/s | plain, us | cuDNN, us | plain / packed |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for cell in CELLS:
        times = {name: timing.median for name, timing in compare(functions(cell)).items()}
        packed, plain, cudnn = (times[name] * 1e6 for name in ("packed", "plain", "cudnn"))
        lines.append(
            f"| {cell.batch} | {cell.rows} | {cell.heads} | {cell.key_heads} | {cell.length} | {packed:.1f} | "
            f"{cell.bytes / packed / 1e6:.2f} | {plain:.1f} | {cudnn:.1f} | {plain / packed:.2f} |"
        )
        print(lines[-1], flush=True)
    versions = f"jax {jax.__version__}, jax_fa4 {jax_fa4.__version__}"
    command = f"python benchmarks/decoding.py {' '.join(sys.argv[1:])}".strip()
    header = f"{datetime.date.today()}, {jax.devices()[0].device_kind}, {versions}. Command: `{command}`.\n"
    text = "\n".join([header, *lines, ""])
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text)


if __name__ == "__main__":
    main()
