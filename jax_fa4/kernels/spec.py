"""KernelSpec: everything that selects a compiled kernel, and the only place that states tile sizes and padding.

A spec holds what is fixed at compile time and nothing else: batch, sequence lengths, head counts, strides, softmax
scale, window bounds and offsets are run-time parameters of every kernel. One artefact therefore serves every shape.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

ARCHITECTURES = ("sm_90a", "sm_100f")
KINDS = (
    "forward",
    "backward_preprocess",
    "backward_main",
    "backward_postprocess",
    "backward_key_value",
    "backward_query",
)
DTYPES = ("bfloat16", "float16")
MASKS = ("none", "causal", "window")
MAX_HEAD_DIM = 256
HEAD_DIM_GRANULE = 8
"""Head dims are multiples of this many elements (16 bytes: the granule of TMA strides and vector accesses)."""

PADDED_HEAD_DIMS = ((64, 64), (96, 96), (64, 128), (128, 128), (192, 128), (192, 192), (256, 256))
"""Pairs (head_dim, head_dim_v) that kernels are built for, all of them part of a release. Others use the smallest pair
that holds both; TMA fills the difference with zeros on load and drops it on store, so one artefact serves every pair in
between, and no pair of head dims needs the compiler at hand."""

BACKWARD_MASK_FREE_KINDS = ("backward_preprocess", "backward_postprocess")
"""Kinds that touch rows only, never scores: their specs always say ``mask="none"``."""


class UnsupportedSpecError(ValueError):
    """No kernel is built for this combination; the message names the field, its value and what is allowed."""


@dataclass(frozen=True)
class Tile:
    """Tile configuration of one kernel.

    ``m`` query rows by ``n`` keys per step, ``stages`` shared-memory stages of the streamed operand. ``options`` are
    further compile-time integers that only the kernel itself interprets, as sorted ``(name, value)`` pairs.
    """

    m: int
    n: int
    stages: int = 2
    options: tuple[tuple[str, int], ...] = ()

    def option(self, name: str, default: int = 0) -> int:
        """Value of one option, ``default`` where the tile does not set it."""
        return dict(self.options).get(name, default)

    @property
    def name(self) -> str:
        return f"m{self.m}n{self.n}s{self.stages}" + "".join(f"_{key}{value}" for key, value in self.options)


@dataclass(frozen=True)
class KernelSpec:
    """Static description of one kernel; ``head_dim`` and ``head_dim_v`` are padded ones (see :meth:`create`)."""

    arch: str
    kind: str
    dtype: str
    head_dim: int
    head_dim_v: int
    tile: Tile
    mask: str = "none"
    varlen: bool = False
    pack_gqa: bool = False
    deterministic: bool = True

    def __post_init__(self) -> None:
        _require("arch", self.arch, ARCHITECTURES)
        _require("kind", self.kind, KINDS)
        _require("dtype", self.dtype, DTYPES)
        _require("mask", self.mask, MASKS)
        _require("(head_dim, head_dim_v)", (self.head_dim, self.head_dim_v), PADDED_HEAD_DIMS)

    @classmethod
    def create(
        cls,
        *,
        arch: str,
        kind: str,
        dtype: str,
        head_dim: int,
        head_dim_v: int | None = None,
        mask: str = "none",
        varlen: bool = False,
        pack_gqa: bool = False,
        deterministic: bool = True,
        tile: Tile | None = None,
    ) -> KernelSpec:
        """Spec that serves true head dims ``head_dim`` (query, key) and ``head_dim_v`` (value; default the same).

        Raises :class:`UnsupportedSpecError` for a field outside the allowed values. ``tile`` overrides the table
        (for tuning).
        """
        _require("arch", arch, ARCHITECTURES)
        _require("kind", kind, KINDS)
        padded, padded_v = padded_head_dims(head_dim, head_dim if head_dim_v is None else head_dim_v)
        if kind in BACKWARD_MASK_FREE_KINDS:
            mask = "none"
        if kind == "backward_postprocess":
            varlen = False
        if tile is None:
            tile = select_tile(arch, kind, padded, padded_v, mask)
        if kind not in ("backward_main", "backward_postprocess") and not tile.option("turns"):
            deterministic = True  # no sums in several CTAs: one artefact serves both settings
        return cls(arch, kind, dtype, padded, padded_v, tile, mask, varlen, pack_gqa, deterministic)

    @property
    def name(self) -> str:
        """Readable and unique: every field is in it."""
        flags = [
            flag
            for flag, on in (
                ("varlen", self.varlen),
                ("packgqa", self.pack_gqa),
                ("nondet", not self.deterministic),
            )
            if on
        ]
        return "_".join(
            [
                self.kind,
                self.arch,
                self.dtype,
                f"d{self.head_dim}x{self.head_dim_v}",
                self.mask,
                *flags,
                self.tile.name,
            ]
        )

    def to_json(self) -> dict[str, Any]:
        """Plain data; :meth:`from_json` restores an equal spec."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> KernelSpec:
        tile = dict(data["tile"])
        tile["options"] = tuple((str(key), int(value)) for key, value in tile["options"])
        return cls(**{**data, "tile": Tile(**tile)})

    def digest(self) -> str:
        """Hexadecimal SHA-256 of all fields."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()

    def with_tile(self, tile: Tile) -> KernelSpec:
        return replace(self, tile=tile)


def padded_head_dims(head_dim: int, head_dim_v: int) -> tuple[int, int]:
    """The least pair of :data:`PADDED_HEAD_DIMS` that holds both; raises :class:`UnsupportedSpecError`."""
    for argument, value in (("head_dim", head_dim), ("head_dim_v", head_dim_v)):
        if value <= 0 or value > MAX_HEAD_DIM or value % HEAD_DIM_GRANULE:
            raise UnsupportedSpecError(
                f"{argument} is {value}; the kernels take multiples of {HEAD_DIM_GRANULE} from {HEAD_DIM_GRANULE} to "
                f"{MAX_HEAD_DIM}"
            )
    fitting = [pair for pair in PADDED_HEAD_DIMS if head_dim <= pair[0] and head_dim_v <= pair[1]]
    return min(fitting, key=sum)


def select_tile(arch: str, kind: str, head_dim: int, head_dim_v: int, mask: str) -> Tile:
    """Tile for padded head dims, from the tables below; raises :class:`UnsupportedSpecError` where none is stated."""
    table = _TILE_TABLES.get((arch, kind))
    if table is None:
        raise UnsupportedSpecError(
            f"kind is {kind!r}; {arch} has kernels for {sorted(k for a, k in _TILE_TABLES if a == arch)}"
        )
    return table(head_dim, head_dim_v, mask)


def _sm90_forward_tile(head_dim: int, head_dim_v: int, mask: str) -> Tile:
    """Rows by keys such that Q, the K and V rings and O fit 227 KiB and the accumulators fit the registers.

    Chosen by measurement: docs/measurements/2026-11-29-sm90-forward.md.
    """
    largest = max(head_dim, head_dim_v)
    if largest <= 64:
        return Tile(m=192, n=128, stages=2)
    if largest <= 96:
        return Tile(m=192, n=96, stages=2)
    if head_dim_v <= 128:
        return Tile(m=128, n=128 if head_dim <= 192 else 96, stages=2)
    if largest <= 192:
        return Tile(m=128, n=96, stages=2)
    return Tile(m=128, n=64, stages=2)


def sm100_pair_tile(head_dim: int, head_dim_v: int) -> Tile | None:
    """Tile of the Blackwell forward for pairs of CTAs (padded head dims), None where the tensor core's M = 256 has no
    use: each CTA of a pair holds half of V's columns, in whole boxes of 64."""
    if head_dim_v not in (128, 256) or head_dim < 128:
        return None
    return _sm100_forward_tile(head_dim, head_dim_v, "none", ctas=2)


def _sm100_forward_tile(head_dim: int, head_dim_v: int, mask: str, ctas: int = 1) -> Tile:
    """Query tiles in flight (one or two of 128 rows), and ring slots for chunks of K and V that fill the rest.

    Chunks make the slots small enough that the ring holds at least one and a quarter key blocks. Options:
    ``kchunks``, ``vchunks`` (chunks of a key block), ``exp2fma`` (of 16 pairs, those whose exponentials the FMA units
    compute: where the special-function unit is the limit), ``ctas`` (2: pairs of CTAs, each with half of K and V).
    """
    rows, columns = 128, 64
    box = rows * columns * 2
    available = 224 * 1024
    boxes, boxes_v = -(-head_dim // columns), -(-head_dim_v // columns)
    # Tensor memory has room for two accumulators of up to 128 columns beside the scores, or one of up to 256.
    tiles = 2 if boxes_v <= 2 and boxes <= 3 else 1
    k_chunks, v_chunks = 1, 1
    slot = max(boxes, boxes_v)
    if slot > 2:
        slot = 1 if boxes == 3 else 2
        k_chunks = -(-boxes // slot)
        v_chunks = next(chunks for chunks in (1, 2, 4, 8) if boxes_v <= slot * chunks)
    free = available - tiles * boxes * box
    slot_bytes = slot * box // ctas
    slots = (free - tiles * boxes_v * box) // slot_bytes
    if 2 * slots < 3 * (k_chunks + v_chunks):
        # O leaves through the memory of Q instead.
        slots = free // slot_bytes
    exp2fma = 0 if tiles == 1 or head_dim > 128 else 2 if head_dim > 64 else 3
    options: tuple[tuple[str, int], ...] = (("exp2fma", exp2fma), ("kchunks", k_chunks), ("vchunks", v_chunks))
    if ctas == 2:
        options = (("ctas", 2), *options)
    return Tile(m=rows * tiles, n=128, stages=min(slots, 4 * (k_chunks + v_chunks)), options=options)


def splits_backward(head_dim: int, head_dim_v: int) -> bool:
    """Whether the backward of these head dims is two kernels (kinds "backward_key_value", "backward_query") and not one
    (kind "backward_main"): dK and dV of 128 keys no longer fit Hopper's registers, nor, with dQ and two score tiles,
    Blackwell's tensor memory."""
    return max(head_dim, head_dim_v) > 128


def _sm90_backward_tile(head_dim: int, head_dim_v: int, mask: str) -> Tile:
    """Query rows by keys of the main kernel; the other kernels share its rows, which fix the scratch's layout.

    Two consumer warpgroups hold 64 keys each; dK, dV and two score tiles must fit 240 registers a thread.
    """
    if splits_backward(head_dim, head_dim_v):
        raise UnsupportedSpecError(f"head_dim is {head_dim}, head_dim_v is {head_dim_v}; up to 128 in one kernel")
    # Persistent CTAs gain 1 to 13 % at 64 columns, and lose up to 4 % above (docs/measurements/2026-11-30-*).
    persistent = max(head_dim, head_dim_v) <= 64
    options = (("persistent", 1), ("pingpong", 1)) if persistent else (("pingpong", 1),)
    return Tile(m=128 if persistent else 64, n=128, stages=2, options=options)


def _sm90_preprocess_tile(head_dim: int, head_dim_v: int, mask: str) -> Tile:
    """Rows of the kernels that follow; option ``turns``: whether they count turns on dQ."""
    if splits_backward(head_dim, head_dim_v):
        return Tile(m=384, n=0)  # whole blocks of 48, 64 and 128 rows
    return Tile(m=_sm90_backward_tile(head_dim, head_dim_v, mask).m, n=0, options=(("turns", 1),))


def _sm90_key_value_tile(head_dim: int, head_dim_v: int, mask: str) -> Tile:
    """64 keys: dV in one warpgroup's registers, dK in the other's. A tile of Q stays from one step's S to the next
    step's end of dK, so that two stages would stall the loads: three, of fewer rows where they are wide."""
    return Tile(m=64 if max(head_dim, head_dim_v) <= 192 else 48, n=64, stages=3)


def _sm90_query_tile(head_dim: int, head_dim_v: int, mask: str) -> Tile:
    """64 rows of dQ in each of two warpgroups' registers; 64 keys a step keep K's and V's rings in shared memory."""
    return Tile(m=128, n=64)


LONG_QUERIES = 2048
"""Query rows from which :func:`long_query_tile` counts: its taller tiles waste more of a short last tile."""

_LONG_QUERY_TILES = {
    ("sm_90a", "forward", 128, 128, "none"): Tile(m=192, n=80, stages=2),
}


def long_query_tile(spec: KernelSpec) -> Tile | None:
    """A tile that is faster than the spec's own for at least :data:`LONG_QUERIES` query rows, None if there is none."""
    return _LONG_QUERY_TILES.get((spec.arch, spec.kind, spec.head_dim, spec.head_dim_v, spec.mask))


def pair_tile(spec: KernelSpec) -> Tile | None:
    """A tile for pairs of CTAs that share K and V, where it is faster for more query rows than one CTA has, else None.

    That is dense work, and, whatever the mask, accumulators so wide that one CTA's shared memory holds little more than
    one key block.
    """
    if (spec.arch, spec.kind) != ("sm_100f", "forward") or spec.varlen or spec.pack_gqa:
        return None
    if spec.mask != "none" and spec.head_dim_v <= 128:
        return None
    return sm100_pair_tile(spec.head_dim, spec.head_dim_v)


FAST_EXP2_CAPABILITIES = ("10.3",)
"""Compute capabilities (B300, GB300) with twice the special-function results a cycle of others of their architecture:
exponentials on the FMA units would only cost there. The machine code is the same family's, so that an artefact for one
GPU is right on the other."""


def fast_exp2_spec(spec: KernelSpec) -> KernelSpec | None:
    """The kernel without exponentials on the FMA units; None where there is no faster one: the spec has none anyway, or
    it is for short queries, which memory binds."""
    if not spec.tile.option("exp2fma") or spec.pack_gqa:
        return None
    options = ((name, 0 if name == "exp2fma" else value) for name, value in spec.tile.options)
    return spec.with_tile(replace(spec.tile, options=tuple(options)))


def _sm100_backward_tile(head_dim: int, head_dim_v: int, mask: str) -> Tile:
    """128 query rows by 128 keys, two stages of Q; option ``dout``: stages of dO, two where shared memory has room.

    S, dP (or dQ), dK and dV fill tensor memory at 128 columns each.
    """
    if splits_backward(head_dim, head_dim_v):
        raise UnsupportedSpecError(f"head_dim is {head_dim}, head_dim_v is {head_dim_v}; up to 128 in one kernel")
    return Tile(m=128, n=128, stages=2, options=(("dout", 1 if min(head_dim, head_dim_v) > 64 else 2),))


def sm100_pair_backward_tile(head_dim: int, head_dim_v: int) -> Tile | None:
    """Tile of the Blackwell backward for pairs of CTAs (padded head dims), None where there is no such kernel: each CTA
    has half of the columns of Q, K and dO. 128 query rows by the pair's keys."""
    if not 64 < head_dim <= 192 or not 64 < head_dim_v <= 128:
        return None
    return Tile(m=128, n=256, stages=1, options=(("ctas", 2),))


COUNTS_TURNS = Tile(m=128, n=0, options=(("turns", 1),))
"""Of Blackwell's preprocess before a kernel that adds dQ in turns; option ``turns``: there are counters to clear."""


def _sm100_preprocess_tile(head_dim: int, head_dim_v: int, mask: str) -> Tile:
    """Rows of the kernels that follow."""
    return Tile(m=128, n=0) if splits_backward(head_dim, head_dim_v) else COUNTS_TURNS


def _sm100_postprocess_tile(head_dim: int, head_dim_v: int, mask: str) -> Tile:
    """Rows of the main kernel; option ``rows``: its dQ has one row a thread."""
    return Tile(m=128, n=0, options=(("rows", 1),))


def _sm100_key_value_tile(head_dim: int, head_dim_v: int, mask: str) -> Tile:
    """128 resident keys, 64 query rows a step: two score tiles leave 384 columns of tensor memory for dK and dV."""
    return Tile(m=64, n=128)


def _sm100_query_tile(head_dim: int, head_dim_v: int, mask: str) -> Tile:
    """128 resident query rows, 64 keys a step."""
    return Tile(m=128, n=64)


_TILE_TABLES = {
    ("sm_90a", "forward"): _sm90_forward_tile,
    ("sm_90a", "backward_preprocess"): _sm90_preprocess_tile,
    ("sm_90a", "backward_key_value"): _sm90_key_value_tile,
    ("sm_90a", "backward_query"): _sm90_query_tile,
    ("sm_90a", "backward_main"): _sm90_backward_tile,
    ("sm_90a", "backward_postprocess"): _sm90_backward_tile,
    ("sm_100f", "forward"): _sm100_forward_tile,
    ("sm_100f", "backward_preprocess"): _sm100_preprocess_tile,
    ("sm_100f", "backward_main"): _sm100_backward_tile,
    ("sm_100f", "backward_postprocess"): _sm100_postprocess_tile,
    ("sm_100f", "backward_key_value"): _sm100_key_value_tile,
    ("sm_100f", "backward_query"): _sm100_query_tile,
}


def standard_specs(archs: Iterable[str], kinds: Iterable[str] | None = None) -> list[KernelSpec]:
    """Specs of a release: every mask, dtype and flag for all padded head dims, for kinds that have kernels; also those
    that :mod:`jax_fa4.kernels.select` prefers for some shapes or GPUs."""
    specs: dict[KernelSpec, None] = {}
    wanted = KINDS if kinds is None else tuple(kinds)
    for arch in archs:
        _require("arch", arch, ARCHITECTURES)
        for kind in wanted:
            _require("kind", kind, KINDS)
            if (arch, kind) not in _TILE_TABLES:
                continue
            for dtype in DTYPES:
                for head_dim, head_dim_v in PADDED_HEAD_DIMS:
                    for tile in _tiles(arch, kind, head_dim, head_dim_v):
                        for mask in MASKS:
                            for varlen in (False, True):
                                spec = KernelSpec.create(
                                    arch=arch,
                                    kind=kind,
                                    dtype=dtype,
                                    head_dim=head_dim,
                                    head_dim_v=head_dim_v,
                                    mask=mask,
                                    varlen=varlen,
                                    tile=tile,
                                )
                                specs.setdefault(spec)
                                if kind == "forward":
                                    specs.update(dict.fromkeys(_forward_variants(spec)))
    return list(specs)


def _tiles(arch: str, kind: str, head_dim: int, head_dim_v: int) -> list[Tile | None]:
    """Tiles of the kernels of a kind that calls get, whatever their masks: None for the table's."""
    tiles: list[Tile | None] = [] if _other_backward(kind, head_dim, head_dim_v) else [None]
    pair = sm100_pair_backward_tile(head_dim, head_dim_v) if arch == "sm_100f" else None
    of_pairs = {"backward_preprocess": COUNTS_TURNS, "backward_main": pair, "backward_postprocess": None}
    if pair is not None and kind in of_pairs:
        tiles.append(of_pairs[kind])
    return tiles


def _forward_variants(spec: KernelSpec) -> list[KernelSpec]:
    """The kernels that are faster than ``spec`` for some shapes or GPUs."""
    tiles = [tile for tile in (long_query_tile(spec), pair_tile(spec)) if tile is not None]
    variants = [replace(spec, pack_gqa=True), *map(spec.with_tile, tiles)]
    fast = map(fast_exp2_spec, (spec, *variants))
    return variants + [variant for variant in fast if variant is not None]


def _other_backward(kind: str, head_dim: int, head_dim_v: int) -> bool:
    """Whether the backward of these head dims does without kernels of this kind."""
    if kind in ("backward_main", "backward_postprocess"):
        return splits_backward(head_dim, head_dim_v)
    return kind in ("backward_key_value", "backward_query") and not splits_backward(head_dim, head_dim_v)


def _require(field: str, value: object, allowed: tuple) -> None:
    if value not in allowed:
        raise UnsupportedSpecError(f"{field} is {value!r}; allowed: {', '.join(map(str, allowed))}")
