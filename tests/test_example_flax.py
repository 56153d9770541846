"""examples/flax: data, training with either attention, resuming, a mesh."""

import importlib
import json
import re
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

EXAMPLE = Path(__file__).parents[1] / "examples" / "flax"
MODULES = ("text_data", "model", "records", "sharding", "training", "train_lm", "long_context")
SMALL = ["--layers=1", "--width=32", "--heads=4", "--seq-len=32", "--batch=4", "--sample-bytes=0", "--eval-every=1000"]


@pytest.fixture
def example(monkeypatch):
    """The example's modules, imported as its folder's scripts import each other."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    yield type("Example", (), {name: importlib.import_module(name) for name in MODULES})
    for name in MODULES:
        sys.modules.pop(name, None)


def losses(folder, kind="train"):
    """Loss by step, from the log; fails if a step is logged twice."""
    entries = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    steps = [entry["step"] for entry in entries if entry["kind"] == kind]
    assert len(steps) == len(set(steps))
    return {entry["step"]: entry["loss"] for entry in entries if entry["kind"] == kind}


def train(example, folder, *arguments, **options):
    return example.train_lm.main([*SMALL, f"--out={folder}", *arguments], **options)


def test_loss_curves_of_both_attentions_agree(example, tmp_path):
    curves = {}
    for attention in ("jax_fa4", "jax"):
        train(example, tmp_path / attention, "--steps=50", f"--attention={attention}", "--learning-rate=1e-2")
        curves[attention] = losses(tmp_path / attention)
    assert list(curves["jax"]) == list(range(1, 51))
    np.testing.assert_allclose(list(curves["jax_fa4"].values()), list(curves["jax"].values()), rtol=0, atol=1e-3)
    assert curves["jax"][1] > 5.0 and np.mean([curves["jax"][step] for step in range(41, 51)]) < 3.6


def test_an_interrupted_run_goes_on_as_if_nothing_had_happened(example, tmp_path, capsys):
    arguments = ("--steps=12", "--checkpoint-every=5")
    whole = train(example, tmp_path / "whole", *arguments)

    def interrupt(step):
        if step == 8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(example, tmp_path / "parts", *arguments, on_step=interrupt)
    assert max(losses(tmp_path / "parts")) == 8
    capsys.readouterr()
    parts = train(example, tmp_path / "parts", *arguments)
    assert "resumed from the checkpoint of step 5" in capsys.readouterr().out
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert parts == whole
    # More steps continue a finished run; --fresh starts over.
    assert train(example, tmp_path / "parts", "--steps=13")["step"] == 13
    assert list(losses(tmp_path / "parts")) == list(range(1, 14))
    train(example, tmp_path / "parts", "--steps=2", "--fresh")
    assert list(losses(tmp_path / "parts")) == [1, 2]


def test_a_checkpoint_of_another_model_is_refused(example, tmp_path):
    train(example, tmp_path, "--steps=1")
    with pytest.raises(ValueError, match=r"layers: 1 there, 3 now.*--fresh"):
        train(example, tmp_path, "--steps=2", "--layers=3")


@pytest.mark.skipif(len(jax.devices("cpu")) < 4, reason="needs 4 CPU devices")
def test_mesh(example, tmp_path):
    train(example, tmp_path / "one", "--steps=5")
    result = train(example, tmp_path / "four", "--steps=5", "--mesh=data=2,model=2")
    np.testing.assert_allclose(
        list(losses(tmp_path / "four").values()), list(losses(tmp_path / "one").values()), rtol=0, atol=1e-4
    )
    # A checkpoint of four devices is read by one; with nothing left to train, that one evaluates.
    resumed = train(example, tmp_path / "four", "--steps=5")
    assert resumed["loss"] == pytest.approx(result["loss"], abs=1e-4)


@pytest.mark.skipif(len(jax.devices("cpu")) < 4, reason="needs 4 CPU devices")
@pytest.mark.parametrize(
    "mesh, strategy, layout",
    [("data=2,seq=2", "ring", "zigzag"), ("model=2,seq=2", "ulysses", "zigzag"), ("seq=4", "all_gather", "contiguous")],
)
def test_sequence_parallel(example, tmp_path, mesh, strategy, layout, request):
    if strategy != "ring" and not request.config.getoption("--long"):
        pytest.skip("long mode only (--long): the ring runs otherwise")
    train(example, tmp_path / "one", "--steps=4")
    arguments = (f"--mesh={mesh}", f"--sequence-parallel={strategy}", f"--layout={layout}", "--sample-bytes=5")
    train(example, tmp_path / "split", "--steps=4", *arguments)
    np.testing.assert_allclose(
        list(losses(tmp_path / "split").values()), list(losses(tmp_path / "one").values()), rtol=0, atol=1e-4
    )


@pytest.mark.skipif(len(jax.devices("cpu")) < 8, reason="needs 8 CPU devices")
def test_long_context(example, capsys):
    losses = example.long_context.main(["--tokens=4096", "--window=64", "--steps=4"])
    assert 5.0 < losses[0] < 6.0 and losses[3] < losses[0] - 1e-3
    assert "4,096 tokens over 8 cpu devices, ring, window 64: each device needs" in capsys.readouterr().out


@pytest.mark.skipif(len(jax.devices("cpu")) < 4, reason="needs 4 CPU devices")
def test_what_a_mesh_splits(example):
    """Heads, MLP and their optimizer moments over ``model``, the batch over ``data``, the attention over both."""
    sharding = example.sharding
    model = example.model.ModelConfig(layers=1, width=32, heads=4)
    shapes = []

    def attention_fn(query, key, value, **arguments):
        from jax_fa4.flax import attention_fn

        out = attention_fn(query, key, value, **arguments)
        jax.debug.inspect_array_sharding(out, callback=lambda where: shapes.append(where.shard_shape(out.shape)))
        return out

    mesh = sharding.make_mesh({"data": 2, "model": 2, "seq": 1}, batch=4, heads=4, length=8)
    train_config, split = example.training.TrainConfig(steps=5), sharding.Split(mesh)
    trainer = example.training.Trainer(model, train_config, attention_fn, seed=0, split=split)
    state = jax.jit(trainer.init, out_shardings=sharding.state_shardings(mesh, jax.eval_shape(trainer.init)))()
    tokens = jax.device_put(np.zeros((4, 9), np.int32), sharding.batch_sharding(mesh))
    shapes.clear()
    trainer.train_step.lower(state, tokens).compile()
    assert shapes and set(shapes) == {(2, 8, 2, 8)}
    state, _ = trainer.train_step(state, tokens)
    local = {
        jax.tree_util.keystr(path): leaf.addressable_shards[0].data.shape
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    }
    for start in ("['params']", r"['opt_state'][1][0].mu", r"['opt_state'][1][0].nu"):
        block = start + "['blocks'][0]"
        assert local[block + "['attention']['query']['kernel']"] == (32, 2, 8)
        assert local[block + "['attention']['out']['kernel']"] == (2, 8, 32)
        assert local[block + "['mlp_in']['kernel']"] == (32, 64)
        assert local[block + "['mlp_out']['kernel']"] == (64, 32)


def test_bfloat16_trains(example, tmp_path):
    train(example, tmp_path, "--steps=30", "--dtype=bfloat16", "--learning-rate=1e-2")
    curve = losses(tmp_path)
    assert curve[30] < curve[1] - 1.5


def test_files_and_sample_of_a_run(example, tmp_path, capsys):
    result = train(example, tmp_path, "--steps=4", "--eval-every=2", "--sample-bytes=50")
    assert losses(tmp_path, "held_out").keys() == {2, 4} and losses(tmp_path, "held_out")[4] == result["loss"]
    assert result["bits_per_byte"] == pytest.approx(result["loss"] / np.log(2))
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert re.search(r"step 4: held-out \d\.\d{3} bits per byte", printed)
    assert printed.count("what the model makes of it") == 2


def test_samples(example):
    """Greedy at low temperature: each byte is the most probable one after what is there."""
    model = example.model.ModelConfig(layers=1, width=32, heads=4)
    from flax import nnx

    mesh = example.sharding.make_mesh({"data": 1, "model": 1, "seq": 1}, batch=2, heads=4, length=16)
    split = example.sharding.Split(mesh)
    trainer = example.training.Trainer(model, example.training.TrainConfig(1), nnx.dot_product_attention, 3, split)
    params = trainer.init()["params"]
    prompts = np.arange(32, dtype=np.uint8).reshape(2, 16)
    sample = trainer.sample(params, prompts, 5, temperature=1e-4)
    context = prompts
    for position in range(5):
        byte = np.argmax(trainer._apply(params, context.astype(np.int32))[:, -1], axis=-1)
        assert np.array_equal(sample[:, position], byte)
        context = np.concatenate([context[:, 1:], sample[:, position, None]], axis=1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--mesh=data=0"], "allowed is data=N,model=M"),
        (["--mesh=rows=2"], "allowed is data=N,model=M"),
        (["--attention=best"], "invalid choice"),
        (["--steps=0"], "--steps must be at least 1"),
        (["--temperature=0"], "--temperature must be above 0"),
    ],
)
def test_illegal_command_lines(example, arguments, words, capsys):
    with pytest.raises(SystemExit):
        example.train_lm.main(arguments)
    assert words in capsys.readouterr().err


def test_illegal_sizes(example, tmp_path):
    for arguments, words in (
        (["--mesh=data=3"], "--batch 4 cannot be split"),
        (["--mesh=model=3"], "--heads 4 cannot be split"),
        (["--mesh=data=1000"], "needs 1000 devices"),
        (["--width=33"], "even multiple"),
        (["--seq-len=100000000"], "one window needs"),
        ([f"--data={tmp_path}/absent"], "not a folder"),
        ([f"--data={tmp_path}"], "at least one file in each part"),
    ):
        with pytest.raises(ValueError, match=words):
            train(example, tmp_path / "out", *arguments)


def test_text(example, tmp_path):
    """Other text, split by file name: the same everywhere, and no byte in both parts."""
    text_data = example.text_data
    for number in range(60):
        folder = tmp_path / f"folder{number % 3}"
        folder.mkdir(exist_ok=True)
        (folder / f"{number}.txt").write_bytes(bytes([number]) * 10)
        (folder / f"{number}.bin").write_bytes(b"\xff")
    corpus = text_data.load_corpus(tmp_path)
    assert corpus.train_files + corpus.held_out_files == 60 and corpus.held_out_files >= 1
    newline = {10}
    assert set(corpus.train) & set(corpus.held_out) <= newline
    assert set(corpus.train) | set(corpus.held_out) == set(range(60))
    assert text_data.is_held_out("ast.py") and not text_data.is_held_out("abc.py")

    batch = text_data.training_batch(corpus.train, step=3, batch=5, seq_len=7, seed=1)
    assert batch.shape == (5, 8) and batch.dtype == np.int32
    assert np.array_equal(batch, text_data.training_batch(corpus.train, step=3, batch=5, seq_len=7, seed=1))
    assert not np.array_equal(batch, text_data.training_batch(corpus.train, step=4, batch=5, seq_len=7, seed=1))
    assert not np.array_equal(batch, text_data.training_batch(corpus.train, step=3, batch=5, seq_len=7, seed=2))
    text = np.arange(100, dtype=np.uint8)
    batches = text_data.held_out_batches(text, count=2, batch=3, seq_len=9)
    assert [b.shape for b in batches] == [(3, 10)] * 2
    assert batches[0][0, 0] == 0 and batches[-1][-1, -1] == 99
    for rows in batches:
        assert np.all(np.diff(rows, axis=1) == 1)


def test_default_text_is_the_standard_library(example):
    corpus = example.text_data.load_corpus()
    assert corpus.train_files > 100 and corpus.held_out_files > 5
    assert len(corpus.train) > 1_000_000 and len(corpus.held_out) > 50_000
    text = corpus.train.tobytes() + corpus.held_out.tobytes()
    assert Path(dataclass_source()).read_bytes() in text
    assert Path(pytest.__file__).read_bytes() not in text


def dataclass_source():
    import dataclasses

    return dataclasses.__file__


def test_rotary_positions(example):
    """Scores depend on the distance between positions alone, and lengths are kept."""
    x = jax.random.normal(jax.random.key(0), (1, 8))
    row = np.broadcast_to(x, (12, 1, 8))
    turned = example.model.rotate(row, np.arange(12))
    np.testing.assert_allclose(np.linalg.norm(turned, axis=-1), np.linalg.norm(row, axis=-1), rtol=1e-5)
    scores = np.einsum("qnh,knh->qk", turned, turned)
    for distance in range(12):
        np.testing.assert_allclose(np.diagonal(scores, distance), scores[0, distance], rtol=0, atol=1e-4)
    assert np.ptp(scores[0]) > 0.1


def test_default_run_learns(example, tmp_path, request):
    """What the README promises; several minutes on a busy machine."""
    if not request.config.getoption("--long"):
        pytest.skip("a full training run: only with --long")
    assert example.train_lm.main([f"--out={tmp_path}"])["bits_per_byte"] < 3.0
