"""Trains a byte-level Transformer language model on real text.

    python examples/flax/train_lm.py                      # the sources of this Python's standard library
    python examples/flax/train_lm.py --data ~/my/project  # other text

It shows a progress bar, writes ``log.jsonl``, ``loss.png`` and checkpoints to ``--out``, prints a few lines of text
that the model wrote, and goes on from its last checkpoint when started again (with more ``--steps``, if you like).
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from model import ModelConfig
from records import Checkpoints, Log, abstract, plot
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from sharding import DATA, MODEL, SEQUENCE, Split, batch_sharding, make_mesh, parse_mesh, state_shardings
from text_data import VOCABULARY_SIZE, Corpus, held_out_batches, load_corpus, training_batch
from training import State, TrainConfig, Trainer, bits_per_byte

import jax_fa4.flax
import jax_fa4.parallel

HELD_OUT_BATCHES = 16
"""How many batches an evaluation reads."""
SPEED_WINDOW = 20
"""Tokens per second are those of this many steps."""
TASK = TaskID(0)
"""The one bar of the progress display."""


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=pathlib.Path, help="folder of text files (default: Python's standard library)")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("runs/train_lm"), help="where results go")
    parser.add_argument("--fresh", action="store_true", help="start over instead of resuming from --out")
    parser.add_argument("--attention", choices=("jax_fa4", "jax"), default="jax_fa4", help="default: %(default)s")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--mesh", type=parse_mesh, default="data=1,model=1,seq=1", metavar="data=N,model=M,seq=S")
    parser.add_argument(
        "--sequence-parallel",
        choices=("ring", "all_gather", "ulysses"),
        default="ring",
        help="how devices share a sequence that --mesh splits (default: %(default)s)",
    )
    parser.add_argument("--layout", choices=("contiguous", "zigzag"), default="zigzag", help="of a split sequence")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seq-len", type=int, default=128, help="bytes that the model sees at once")
    parser.add_argument("--batch", type=int, default=16, help="sequences in a step, over all devices")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=TrainConfig.learning_rate, help="peak of the schedule")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--eval-every", type=int, default=100, help="steps between evaluations on held-out text")
    parser.add_argument("--checkpoint-every", type=int, default=100, help="steps between checkpoints")
    parser.add_argument("--sample-bytes", type=int, default=320, help="length of the sample at the end; 0: none")
    parser.add_argument("--temperature", type=float, default=0.7, help="of the sample")
    arguments = parser.parse_args(argv)
    for name in ("steps", "seq_len", "batch", "layers", "width", "heads", "eval_every", "checkpoint_every"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {getattr(arguments, name)}")
    if arguments.sample_bytes < 0:
        parser.error(f"--sample-bytes must not be negative, got {arguments.sample_bytes}")
    if arguments.temperature <= 0:
        parser.error(f"--temperature must be above 0, got {arguments.temperature}")
    return arguments


def attention_function(arguments: argparse.Namespace, split: Split) -> Callable[..., jax.Array]:
    """The ``attention_fn`` for nnx.MultiHeadAttention: ours, or the default of flax (which calls jax.nn).

    Raises:
        ValueError: the sequence is split and the attention is not ours.
    """
    if arguments.mesh[SEQUENCE] > 1:
        if arguments.attention == "jax":
            raise ValueError("--mesh: seq above 1 needs --attention jax_fa4")
        attend = jax_fa4.parallel.make_attention(
            split.mesh,
            batch_axes=DATA,
            head_axis=MODEL,
            sequence_axis=SEQUENCE,
            strategy=arguments.sequence_parallel,
            layout=split.layout,
        )
        return jax_fa4.flax.sharded_attention_fn(attend)
    return nnx.dot_product_attention if arguments.attention == "jax" else jax_fa4.flax.attention_fn


def prompts_for(corpus: Corpus, seq_len: int) -> np.ndarray:
    """Two held-out contexts, uint8 (2, seq_len), for the sample."""
    return np.stack([corpus.held_out[:seq_len], corpus.held_out[-seq_len:]])


def main(argv: Sequence[str] | None = None, on_step: Callable[[int], None] | None = None) -> dict[str, Any]:
    """Runs the program.

    Args:
        argv: command line, without the program's name.
        on_step: called after each step with its number (tests interrupt a run with it).

    Returns:
        The last evaluation: ``step``, held-out ``loss`` (nats per byte) and ``bits_per_byte``.
    """
    arguments = parse_arguments(argv)
    console = Console()
    corpus = load_corpus(arguments.data)
    model = ModelConfig(VOCABULARY_SIZE, arguments.layers, arguments.width, arguments.heads, dtype=arguments.dtype)
    schedule = TrainConfig(steps=arguments.steps, learning_rate=arguments.learning_rate)
    chunks = 2 if arguments.layout == "zigzag" else 1
    mesh = make_mesh(arguments.mesh, arguments.batch, arguments.heads, arguments.seq_len, chunks)
    split = Split(mesh, arguments.layout)
    trainer = Trainer(model, schedule, attention_function(arguments, split), arguments.seed, split)

    arguments.out.mkdir(parents=True, exist_ok=True)
    checkpoints = Checkpoints(arguments.out / "checkpoints")
    if arguments.fresh:
        checkpoints.clear()
    # --steps is not part of it: a finished run may be started again with more of them.
    run = {**dataclasses.asdict(model), "seed": arguments.seed, "batch": arguments.batch, "seq_len": arguments.seq_len}
    start = checkpoints.latest_step
    abstract_state = jax.eval_shape(trainer.init)
    shardings = state_shardings(mesh, abstract_state)
    if start:
        state = checkpoints.restore(abstract(abstract_state, shardings), run)
        console.print(f"resumed from the checkpoint of step {start}")
    else:
        state = jax.jit(trainer.init, out_shardings=shardings)()
    parameters = sum(leaf.size for leaf in jax.tree.leaves(state["params"]))
    console.print(
        f"{parameters:,} parameters, attention: {arguments.attention}, {arguments.dtype},"
        f" mesh {dict(mesh.shape)} of {mesh.devices.flat[0].platform}"
    )
    console.print(
        f"text: {len(corpus.train):,} bytes in {corpus.train_files} files to train on,"
        f" {len(corpus.held_out):,} in {corpus.held_out_files} held out"
    )

    def save(step: int, state: State) -> None:
        checkpoints.save(step, state, run)

    log = Log(arguments.out / "log.jsonl", start)
    state, result = train(arguments, corpus, trainer, mesh, state, start, log, console, save, on_step)
    checkpoints.close()
    plot(arguments.out / "log.jsonl", arguments.out / "loss.png")
    console.print(f"log, plot and checkpoints: {arguments.out}")
    if arguments.sample_bytes:
        prompts = prompts_for(corpus, arguments.seq_len)
        written = trainer.sample(state["params"], prompts, arguments.sample_bytes, arguments.temperature)
        for prompt, text in zip(prompts, written, strict=True):
            console.rule("held-out text, then what the model makes of it")
            console.print(_readable(prompt), style="dim", end="", markup=False, highlight=False)
            console.print(_readable(text), markup=False, highlight=False)
    return result


def train(
    arguments: argparse.Namespace,
    corpus: Corpus,
    trainer: Trainer,
    mesh: jax.sharding.Mesh,
    state: State,
    start: int,
    log: Log,
    console: Console,
    save: Callable[[int, State], None],
    on_step: Callable[[int], None] | None,
) -> tuple[State, dict[str, Any]]:
    """Trains the steps after ``start`` behind a progress bar; returns the state and the last evaluation."""

    def put(tokens: np.ndarray) -> jax.Array:
        return jax.device_put(tokens, batch_sharding(mesh))

    batch, seq_len = arguments.batch, arguments.seq_len
    held_out = [put(tokens) for tokens in held_out_batches(corpus.held_out, HELD_OUT_BATCHES, batch, seq_len)]

    def evaluate(step: int) -> dict[str, Any]:
        loss = float(np.mean([trainer.evaluate(state["params"], tokens) for tokens in held_out]))
        return {"step": step, "loss": loss, "bits_per_byte": bits_per_byte(loss)}

    result: dict[str, Any] = {}
    times = [time.perf_counter()]
    with _progress(console, arguments.steps, start) as progress:
        for step in range(start + 1, arguments.steps + 1):
            state, loss = trainer.train_step(
                state, put(training_batch(corpus.train, step, batch, seq_len, arguments.seed))
            )
            loss = float(loss)
            times = [*times[-SPEED_WINDOW:], time.perf_counter()]
            speed = batch * seq_len * (len(times) - 1) / (times[-1] - times[0])
            bits = bits_per_byte(loss)
            log.write(kind="train", step=step, loss=loss, bits_per_byte=bits, tokens_per_second=round(speed, 1))
            progress.update(TASK, completed=step, loss=f"{loss:.3f}", bits=f"{bits:.3f}", speed=f"{speed:,.0f}")
            if on_step is not None:
                on_step(step)
            last = step == arguments.steps
            if last or step % arguments.eval_every == 0:
                result = evaluate(step)
                log.write(kind="held_out", **result)
                progress.console.print(f"step {step}: held-out {result['bits_per_byte']:.3f} bits per byte")
            if last or step % arguments.checkpoint_every == 0:
                save(step, state)
            if last or step % arguments.eval_every == 0 or step % arguments.checkpoint_every == 0:
                times = [time.perf_counter()]  # an evaluation is not training time
    if not result:
        result = evaluate(start)
        console.print(f"nothing left to train: held-out {result['bits_per_byte']:.3f} bits per byte at step {start}")
    return state, result


def _progress(console: Console, steps: int, start: int) -> Progress:
    progress = Progress(
        TextColumn("step"),
        MofNCompleteColumn(),
        BarColumn(bar_width=None),
        TextColumn("loss {task.fields[loss]}  {task.fields[bits]} bits/byte  {task.fields[speed]} tokens/s"),
        TimeRemainingColumn(),
        console=console,
    )
    progress.add_task("train", total=steps, completed=start, loss="-", bits="-", speed="-")
    return progress


def _readable(text: np.ndarray) -> str:
    return text.tobytes().decode("utf-8", errors="replace")


if __name__ == "__main__":
    main()
