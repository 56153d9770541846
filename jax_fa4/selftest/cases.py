"""What the self-test runs: plain data that travels to the worker process as JSON."""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass
from typing import Any

MASKS: dict[str, dict] = {
    "full": {},
    "causal": {"is_causal": True},
    "window": {"local_window_size": [100, 37]},
    "lengths": {"query_seq_lengths": [211, 0], "key_value_seq_lengths": [130, 77]},
    "causal+offset": {"is_causal": True, "query_offset": 60},
}


@dataclass(frozen=True)
class Case:
    """One line of the report.

    ``kind`` is "forward" or "backward" (compared with the float32 XLA path), "repeat" (gradients of ``calls`` calls are
    bitwise equal) or "speed" (TFLOP/s forward and backward next to cuDNN).
    """

    kind: str
    head_dims: tuple[int, int]
    mask: str
    dtype: str = "bfloat16"
    shape: tuple[int, int, int] = (2, 300, 413)  # batch, query length, key length
    heads: tuple[int, int] = (4, 2)
    calls: int = 1

    @property
    def name(self) -> str:
        b, t, s = self.shape
        (n, k), (d, d_v) = self.heads, self.head_dims
        dims = f"d{d}" if d == d_v else f"d{d}/{d_v}"
        return f"{self.kind} {dims} {self.mask} {self.dtype} B{b} T{t} S{s} N{n} K{k}"

    def to_json(self) -> dict:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Case:
        plain: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
        return cls(**plain)


def standard(quick: bool) -> list[Case]:
    """The cases of ``selftest``; ``quick`` keeps one per kernel."""
    if quick:
        few = ((64, 64), (128, 128), (256, 256), (192, 128))
        numeric = [Case(kind, d, mask) for kind in ("forward", "backward") for d in few for mask in ("full", "causal")]
        return numeric + [Case("repeat", (128, 128), "causal", shape=(2, 1024, 1024), calls=50)] + speed(((128, 128),))
    dims = ((8, 8), (40, 40), (64, 64), (72, 72), (96, 96), (128, 128), (192, 192), (256, 256), (192, 128), (64, 128))
    numeric = [
        Case(kind, d, mask, dtype)
        for kind, d, mask, dtype in itertools.product(("forward", "backward"), dims, MASKS, ("bfloat16", "float16"))
    ]
    repeat = [
        Case("repeat", (d, d), mask, shape=(4, 2048, 2048), heads=(8, 8), calls=200)
        for d in (64, 128, 256)
        for mask in ("full", "causal")
    ]
    return numeric + repeat + speed(((64, 64), (128, 128), (256, 256), (192, 128)))


def speed(dims: tuple[tuple[int, int], ...]) -> list[Case]:
    """Speed cases: 16k tokens, heads times head_dim about 2048."""
    return [
        Case("speed", d, mask, shape=(2, 8192, 8192), heads=(2048 // d[0], 2048 // d[0]))
        for d in dims
        for mask in ("full", "causal")
    ]
