"""``python -m jax_fa4 bench`` on a CPU."""

from __future__ import annotations

import numpy as np
import pytest

from jax_fa4.__main__ import main
from jax_fa4.cli.bench import Shape, compare

SMALL = ["--batch", "1", "--seq-len", "32", "--heads", "4", "--kv-heads", "2", "--head-dim", "8", "--seconds", "0.01"]


@pytest.mark.parametrize("extra", [["--window", "5"], ["--causal", "--forward", "--kv-len", "48"]])
def test_both_are_measured(extra: list[str], capsys) -> None:
    assert main(["bench", *SMALL, "--dtype", "float32", *extra]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "32 queries" in lines[1] and "4 heads (2 of keys)" in lines[1]
    rows = [line for line in lines if line.endswith("TFLOP/s")]
    assert [line.split()[0] for line in rows] == ["jax_fa4", "jax.nn"] * (1 if "--forward" in extra else 2)
    assert all(float(line.split()[-4]) > 0 for line in rows)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--heads", "3", "--kv-heads", "2"], "--heads: got 3; expected a multiple of the 2 key heads"),
        (["--seq-len", "0"], "--seq-len: got '0'; expected a whole number from 1 up"),
        (["--batch", "two"], "--batch: got 'two'"),
        (["--seconds", "-1"], "--seconds: got '-1'"),
        (["--dtype", "int8"], "--dtype: invalid choice: 'int8'"),
        (["--implementation", "fast"], "--implementation: implementation must be None or one of"),
    ],
)
def test_bad_arguments(arguments: list[str], message: str, capsys) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["bench", *SMALL, *arguments])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_an_implementation_that_cannot_run_here(capsys) -> None:
    assert main(["bench", *SMALL, "--dtype", "float32", "--implementation", "fa4"]) == 1
    assert "cannot run this call: the operands are float32" in capsys.readouterr().err


def test_flop_of_masks() -> None:
    def flop(queries: int, keys: int, causal: bool, window: int | None) -> float:
        return Shape(1, queries, keys, 1, 1, 1, "float32", causal, window).forward_flop

    i, j = np.arange(7)[:, None], np.arange(5)[None]
    assert flop(7, 5, False, None) == 4 * 35
    assert flop(7, 5, True, None) == 4 * (j <= i).sum()
    assert flop(7, 5, False, 3) == flop(7, 5, True, 3) == 4 * ((j <= i) & (j > i - 3)).sum()


def test_calls_alternate() -> None:
    order: list[str] = []
    seconds = compare({name: lambda name=name: order.append(name) for name in "ab"}, 1e-6)
    assert set(seconds) == {"a", "b"} and order == ["a", "b"] * 8
