"""Peak device memory of one forward and backward on long sequences, jax_fa4 and cuDNN, each in a process of its own.

    python benchmarks/memory.py [--length 131072] [--heads 16 16] [--head-dim 128] [--full] [--out TABLE.md]

Batch 1, bfloat16, causal unless ``--full``. Two figures: what the compiled program says that it needs (arguments,
results and temporaries), and the device allocator's high-water mark after running it, with the operands in it.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import subprocess
import sys
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp

import jax_fa4

COLUMNS = ("arguments", "results", "temporaries", "total", "high-water mark")
LIMIT_SECONDS = 240


def attention(name: str, causal: bool):
    """(query, key, value) -> out, by the implementation's name."""
    if name == "cudnn":
        return functools.partial(jax.nn.dot_product_attention, is_causal=causal, implementation="cudnn")
    implementation = "fa4" if name == "jax_fa4" else name
    return functools.partial(jax_fa4.attention, is_causal=causal, implementation=implementation)


def measure(arguments: argparse.Namespace) -> dict[str, float | None]:
    """Bytes by column (None where the platform does not say)."""
    warnings.simplefilter("error", jax_fa4.FallbackWarning)
    n, k = arguments.heads
    shapes = [(1, arguments.length, heads, arguments.head_dim) for heads in (n, k, k, n)]
    function = attention(arguments.worker, not arguments.full)

    def step(query, key, value, cotangent):
        out, pullback = jax.vjp(function, query, key, value)
        return out, *pullback(cotangent)

    avals = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    compiled = jax.jit(step).lower(*avals).compile()
    said = compiled.memory_analysis()
    parts = [said.argument_size_in_bytes, said.output_size_in_bytes, said.temp_size_in_bytes]
    keys = jax.random.split(jax.random.key(0), 4)
    # Drawn one head at a time, so that the draw's float32 is not the high-water mark.
    operands = [jax.jit(lambda key, aval=aval: draw(key, aval))(key) for key, aval in zip(keys, avals, strict=True)]
    jax.block_until_ready(operands)
    before = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    jax.block_until_ready(compiled(*operands))
    after = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    if before is not None and after == before:
        raise RuntimeError("drawing the operands needed more memory than the program: no figure")
    return dict(zip(COLUMNS, [*parts, sum(parts) - said.alias_size_in_bytes, after], strict=True))


def draw(key: jax.Array, aval: jax.ShapeDtypeStruct) -> jax.Array:
    """Random normal values of a (1, T, heads, head_dim) array, head by head."""
    batch, length, heads, width = aval.shape
    one = jax.lax.map(lambda k: jax.random.normal(k, (batch, length, width), aval.dtype), jax.random.split(key, heads))
    return jnp.moveaxis(one, 0, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=131072)
    parser.add_argument("--heads", nargs=2, type=int, default=[16, 16], metavar=("N", "K"))
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--full", action="store_true", help="no causal mask")
    parser.add_argument("--implementations", nargs="+", default=["jax_fa4", "cudnn"], help="also: blockwise, xla")
    parser.add_argument("--out", type=Path, help="Markdown file to write")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        device = jax.devices()[0]
        print(json.dumps({"device": device.device_kind, "bytes": measure(arguments)}))
        return
    lines = [f"| implementation | {' | '.join(f'{c}, GiB' for c in COLUMNS)} |", "| --- " * (len(COLUMNS) + 1) + "|"]
    device = ""
    for name in arguments.implementations:
        command = [sys.executable, __file__, *sys.argv[1:], "--worker", name]
        reply = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=LIMIT_SECONDS, check=False)
        if reply.returncode:
            lines.append(f"| {name} | failed" + " | " * len(COLUMNS) + "|")
        else:
            answer = json.loads(reply.stdout.splitlines()[-1])
            device = answer["device"]
            figures = (answer["bytes"][column] for column in COLUMNS)
            lines.append(f"| {name} | {' | '.join('—' if x is None else f'{x / 2**30:.3f}' for x in figures)} |")
        print(lines[-1], flush=True)
    header = (
        f"{datetime.date.today()}, {device}, jax {jax.__version__}, jax_fa4 {jax_fa4.__version__}. "
        f"Command: `python benchmarks/memory.py {' '.join(sys.argv[1:])}`.\n"
    )
    text = "\n".join([header, *lines, ""])
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text)


if __name__ == "__main__":
    main()
