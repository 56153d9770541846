"""The child process of the self-test: reads cases as JSON lines, answers each with one JSON line.

Run as ``python -m jax_fa4.selftest.worker IMPLEMENTATION``. It may hang or die on a faulty kernel; the parent sees
that.
"""

from __future__ import annotations

import functools
import json
import sys
import time
import zlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import jax_fa4
from jax_fa4.selftest.cases import MASKS, Case

ABSOLUTE = {"bfloat16": 8e-3, "float16": 2e-3}  # below this, an error says nothing in that dtype at unit-size inputs


def _operands(case: Case) -> list[jax.Array]:
    (b, t, s), (n, k), (d, d_v) = case.shape, case.heads, case.head_dims
    rng = np.random.default_rng(zlib.crc32(case.name.encode()))
    shapes = ((b, t, n, d), (b, s, k, d), (b, s, k, d_v), (b, t, n, d_v))
    return [jnp.asarray(rng.standard_normal(shape, np.float32), case.dtype) for shape in shapes]


def _mask_arguments(case: Case) -> dict:
    return {
        name: np.asarray(v, np.int32) if name.endswith("lengths") else tuple(v) if isinstance(v, list) else v
        for name, v in MASKS[case.mask].items()
    }


def _function(case: Case, implementation: str) -> Callable:
    return functools.partial(jax_fa4.attention_with_lse, implementation=implementation, **_mask_arguments(case))


def _results(case: Case, implementation: str, dtype) -> dict[str, np.ndarray]:
    """Output and LSE, or the three gradients, computed from inputs converted to ``dtype``."""
    query, key, value, cotangent = (x.astype(dtype) for x in _operands(case))
    function = _function(case, implementation)
    if case.kind == "forward":
        out, lse = jax.jit(function)(query, key, value)
        return {"out": np.asarray(out, np.float64), "lse": np.asarray(lse, np.float64)}

    def pull(q, k, v, g):
        (_, lse), pullback = jax.vjp(function, q, k, v)
        return pullback((g, jnp.where(jnp.isneginf(lse), 0, 0.5)))

    grads = jax.jit(pull)(query, key, value, cotangent)
    return dict(zip(("d_query", "d_key", "d_value"), (np.asarray(x, np.float64) for x in grads), strict=True))


def _numeric(case: Case, implementation: str) -> dict:
    with jax.default_matmul_precision("highest"):
        exact = _results(case, "xla", jnp.float32)
    low = _results(case, "xla", case.dtype)
    got = _results(case, implementation, case.dtype)
    worst, held = {}, True
    for name, value in got.items():
        limit = 2 * _largest(low[name], exact[name]) + (1e-3 if name == "lse" else ABSOLUTE[case.dtype])
        error = _largest(value, exact[name])
        worst[name] = {"error": error, "allowed": limit}
        held &= bool(error <= limit)
    return {"held": held, "errors": worst}


def _largest(a: np.ndarray, b: np.ndarray) -> float:
    """Largest absolute difference; infinite where only one side is -inf or NaN."""
    same = np.isneginf(a) & np.isneginf(b)
    difference = np.where(same, 0, np.abs(np.where(same, 0, a) - np.where(same, 0, b)))
    return float(np.max(np.where(np.isnan(difference), np.inf, difference), initial=0))


def _repeat(case: Case, implementation: str) -> dict:
    query, key, value, cotangent = _operands(case)
    function = _function(case, implementation)

    def everything(q, k, v, g):
        (out, lse), pullback = jax.vjp(function, q, k, v)
        return out, lse, *pullback((g, jnp.zeros_like(lse)))

    run = jax.jit(everything)
    first = [np.asarray(x).tobytes() for x in run(query, key, value, cotangent)]
    different = sum(
        [np.asarray(x).tobytes() for x in run(query, key, value, cotangent)] != first for _ in range(case.calls - 1)
    )
    return {"held": different == 0, "calls": case.calls, "different": different}


def _seconds(function: Callable[[], object]) -> float:
    """Median over bursts of queued calls, seconds per call."""
    jax.block_until_ready(function())
    samples = []
    for _ in range(7):
        start = time.perf_counter()
        results = [function() for _ in range(10)]
        jax.block_until_ready(results)
        samples.append((time.perf_counter() - start) / 10)
    return float(np.median(samples))


def _speed(case: Case, implementation: str) -> dict:
    query, key, value, cotangent = _operands(case)
    (b, t, s), (n, _), (d, d_v) = case.shape, case.heads, case.head_dims
    flop = 2.0 * b * n * t * s * (d + d_v) / (2 if case.mask == "causal" else 1)
    arguments = _mask_arguments(case)
    rates: dict[str, dict[str, float] | str] = {}
    functions = {
        "jax_fa4": functools.partial(jax_fa4.attention, implementation=implementation, **arguments),
        "cudnn": functools.partial(jax.nn.dot_product_attention, implementation="cudnn", **arguments),
    }
    for name, function in functions.items():
        try:
            forward = _seconds(functools.partial(jax.jit(function), query, key, value))
            _, pullback = jax.jit(functools.partial(jax.vjp, function))(query, key, value)
            backward = _seconds(functools.partial(jax.jit(lambda pull, g: pull(g)), pullback, cotangent))
            rates[name] = {"forward": flop / forward / 1e12, "backward": 2.5 * flop / backward / 1e12}
        except Exception as error:  # cuDNN does not take every case; ours failing is what the test is for
            if name == "jax_fa4":
                raise
            rates[name] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return {"held": True, "tflops": rates}


KINDS = {"forward": _numeric, "backward": _numeric, "repeat": _repeat, "speed": _speed}


def answer(fields: dict, implementation: str) -> dict:
    """Runs one case; an exception becomes part of the answer."""
    case = Case.from_json(fields)
    try:
        return KINDS[case.kind](case, implementation)
    except Exception as error:
        return {"held": False, "failure": f"{type(error).__name__}: {error}"}


def main() -> None:
    implementation = sys.argv[1]
    replies = sys.stdout
    sys.stdout = sys.stderr  # whatever a library prints must not mix with the replies
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line), implementation)), file=replies, flush=True)


if __name__ == "__main__":
    main()
