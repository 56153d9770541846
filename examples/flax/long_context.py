"""One training step after another on a single very long text, its tokens split over all devices.

    XLA_FLAGS=--xla_force_host_platform_device_count=8 python examples/flax/long_context.py  # a million tokens on a CPU
    python examples/flax/long_context.py --width 1024 --heads 8 --layers 8 --window 0 --dtype bfloat16  # on GPUs

Each device holds tokens / devices positions of every activation; attention is the only layer that looks across, through
``jax_fa4.parallel``. Prints loss, speed and the memory that each device needs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import jax
import numpy as np
from model import ModelConfig
from sharding import DATA, MODEL, SEQUENCE, Split, batch_sharding, make_mesh, state_shardings
from text_data import VOCABULARY_SIZE, load_corpus
from training import TrainConfig, Trainer, bits_per_byte

import jax_fa4.flax
import jax_fa4.parallel

GIB = 2**30


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2**20, help="length of the text (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--strategy", choices=("ring", "all_gather", "ulysses"), default="ring")
    parser.add_argument("--layout", choices=("contiguous", "zigzag"), default="contiguous")
    parser.add_argument(
        "--window", type=int, default=512, help="keys that a token sees before itself; 0: all (quadratic in --tokens)"
    )
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Runs the program; returns the loss of each step, nats per byte."""
    arguments = parse_arguments(argv)
    devices = jax.device_count()
    sizes = {DATA: 1, MODEL: 1, SEQUENCE: devices}
    chunks = 2 if arguments.layout == "zigzag" else 1
    mesh = make_mesh(sizes, 1, arguments.heads, arguments.tokens, chunks)
    split = Split(mesh, arguments.layout)
    attend = jax_fa4.parallel.make_attention(
        mesh, batch_axes=DATA, head_axis=MODEL, sequence_axis=SEQUENCE, strategy=arguments.strategy, layout=split.layout
    )
    window = (arguments.window, 0) if arguments.window else None
    attention_fn = jax_fa4.flax.sharded_attention_fn(attend, local_window_size=window)
    model = ModelConfig(VOCABULARY_SIZE, arguments.layers, arguments.width, arguments.heads, dtype=arguments.dtype)
    trainer = Trainer(model, TrainConfig(steps=arguments.steps), attention_fn, 0, split)

    text = load_corpus(None).train
    tokens = np.resize(text, arguments.tokens + 1)[None].astype(np.int32)  # a short text is repeated
    state = jax.jit(trainer.init, out_shardings=state_shardings(mesh, jax.eval_shape(trainer.init)))()
    tokens = jax.device_put(tokens, batch_sharding(mesh))
    step = trainer.train_step.lower(state, tokens).compile()
    memory = step.memory_analysis()
    print(
        f"{arguments.tokens:,} tokens over {devices} {mesh.devices.flat[0].platform} devices, {arguments.strategy}, "
        f"window {arguments.window or 'none'}: each device needs {memory.temp_size_in_bytes / GIB:.2f} GiB of "
        f"temporaries and {memory.argument_size_in_bytes / GIB:.2f} GiB of arguments",
        flush=True,
    )
    losses = []
    for number in range(1, arguments.steps + 1):
        start = time.perf_counter()
        state, loss = step(state, tokens)
        losses.append(float(loss))
        seconds = time.perf_counter() - start
        print(
            f"step {number}: loss {losses[-1]:.3f} ({bits_per_byte(losses[-1]):.3f} bits per byte), {seconds:.1f} s, "
            f"{arguments.tokens / seconds:,.0f} tokens/s",
            flush=True,
        )
    for device in mesh.devices.flat:
        if (stats := device.memory_stats()) is not None:
            print(f"{device}: peak {stats['peak_bytes_in_use'] / GIB:.2f} GiB")
    return losses


if __name__ == "__main__":
    main()
