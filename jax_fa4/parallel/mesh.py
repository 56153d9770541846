"""Sequence parallelism from outside: a function of global arrays that wraps ``jax.shard_map``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jax.typing import ArrayLike

from jax_fa4.api import attention_with_lse
from jax_fa4.parallel import layout as layouts
from jax_fa4.parallel.api import all_gather_attention, ring_attention, ulysses_attention

_STRATEGIES: dict[str, Callable] = {
    "ring": ring_attention,
    "all_gather": all_gather_attention,
    "ulysses": ulysses_attention,
}

Axes = str | Sequence[str] | None


def _names(axes: Axes) -> tuple[str, ...]:
    if axes is None:
        return ()
    return (axes,) if isinstance(axes, str) else tuple(axes)


def _check_axes(mesh: Mesh | AbstractMesh, **axes: tuple[str, ...]) -> None:
    used: dict[str, str] = {}
    for argument, names in axes.items():
        for name in names:
            if name not in mesh.axis_names:
                raise ValueError(f"{argument}: got {name!r}; the mesh has the axes {mesh.axis_names}")
            if name in used:
                raise ValueError(f"{argument}: got {name!r}, which {used[name]} has already; expected different axes")
            used[name] = argument


def make_attention(
    mesh: Mesh | AbstractMesh,
    *,
    batch_axes: Axes = None,
    head_axis: str | None = None,
    sequence_axis: str | None = None,
    strategy: str = "ring",
    layout: str = "contiguous",
    implementation: str | None = None,
    return_lse: bool = False,
) -> Callable[..., Any]:
    """Attention of global arrays, split over a mesh.

    Args:
      mesh: the device mesh.
      batch_axes: mesh axes that split the batch, or None.
      head_axis: mesh axis that splits query and key heads, or None.
      sequence_axis: mesh axis that splits the sequence, or None (then there is no communication).
      strategy: how devices share a split sequence: "ring", "all_gather" or "ulysses".
      layout: order of the tokens of the global arrays; for "zigzag" reorder them with
        :func:`jax_fa4.parallel.to_layout` first, and positional embeddings with
        :func:`jax_fa4.parallel.positions`.
      implementation: as for :func:`jax_fa4.attention`.
      return_lse: the function returns (out, lse).

    Returns:
      A function of global arrays, for use inside or outside jit: query (B, T, N, H), key (B, S, K, H), value
      (B, S, K, Hv), and as keywords those of :func:`jax_fa4.attention` but bias, mask and return_residual.

    Raises:
      ValueError: an unknown axis, strategy or layout, or an axis used twice. The returned function raises ValueError
        where a dimension does not divide by its axes, and what :func:`jax_fa4.attention` raises.
    """
    layouts.check(layout)
    if strategy not in _STRATEGIES:
        raise ValueError(f"strategy: got {strategy!r}; expected one of {', '.join(map(repr, _STRATEGIES))}")
    batch, heads, sequence = _names(batch_axes), _names(head_axis), _names(sequence_axis)
    _check_axes(mesh, batch_axes=batch, head_axis=heads, sequence_axis=sequence)
    sizes = dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))

    def ways(names: tuple[str, ...]) -> int:
        total = 1
        for name in names:
            total *= sizes[name]
        return total

    whole = PartitionSpec(batch or None, sequence or None, heads or None, None)
    lse_spec = PartitionSpec(batch or None, heads or None, sequence or None)
    option_specs = {
        "query_seq_lengths": PartitionSpec(batch or None),
        "key_value_seq_lengths": PartitionSpec(batch or None),
        "query_segment_ids": PartitionSpec(batch or None, sequence or None),
        "key_value_segment_ids": PartitionSpec(batch or None, sequence or None),
        "sinks": PartitionSpec(heads or None),
    }

    def check_divides(name: str, x: Array) -> None:
        for axis, (what, names) in enumerate((("batch", batch), ("length", sequence), ("heads", heads))):
            if x.shape[axis] % ways(names):
                raise ValueError(
                    f"{name}: {what} {x.shape[axis]} of shape {x.shape} does not divide by the {ways(names)} devices "
                    f"of mesh axes {names}"
                )

    def function(
        query: ArrayLike,
        key: ArrayLike,
        value: ArrayLike,
        *,
        scale: ArrayLike | None = None,
        is_causal: bool = False,
        query_seq_lengths: ArrayLike | None = None,
        key_value_seq_lengths: ArrayLike | None = None,
        local_window_size: int | tuple[int | None, int | None] | None = None,
        query_segment_ids: ArrayLike | None = None,
        key_value_segment_ids: ArrayLike | None = None,
        logits_soft_cap: float | None = None,
        sinks: ArrayLike | None = None,
        query_offset: ArrayLike = 0,
        deterministic: bool = True,
    ) -> Any:
        static: dict[str, Any] = dict(
            is_causal=is_causal,
            local_window_size=local_window_size,
            logits_soft_cap=logits_soft_cap,
            deterministic=deterministic,
        )
        options: dict[str, Any] = dict(
            scale=scale,
            query_seq_lengths=query_seq_lengths,
            key_value_seq_lengths=key_value_seq_lengths,
            query_segment_ids=query_segment_ids,
            key_value_segment_ids=key_value_segment_ids,
            sinks=sinks,
            query_offset=query_offset,
        )
        operands = {name: jnp.asarray(x) for name, x in (("query", query), ("key", key), ("value", value))}
        for name, x in operands.items():
            if x.ndim != 4:
                raise ValueError(f"{name}: got shape {x.shape}; expected 4 dimensions, (B, length, heads, head_dim)")
            check_divides(name, x)
        arrays = {name: x for name, x in options.items() if _is_array(x)}
        static |= {name: x for name, x in options.items() if name not in arrays}

        def local(operands: dict[str, Array], arrays: dict[str, Array]) -> tuple[Array, Array]:
            arguments = {**operands, **static, **arrays, "implementation": implementation}
            if sequence:
                run = _STRATEGIES[strategy]
                return run(**arguments, axis_name=sequence[0], layout=layout, return_lse=True)
            return attention_with_lse(**arguments)

        def spec(name: str, x: Any) -> PartitionSpec:
            per_batch = PartitionSpec(batch or None) if jnp.ndim(x) == 1 else PartitionSpec()
            return option_specs.get(name, per_batch)

        run = jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(dict.fromkeys(operands, whole), {name: spec(name, x) for name, x in arrays.items()}),
            out_specs=(whole, lse_spec),
        )
        out, lse = run(operands, arrays)
        return (out, lse) if return_lse else out

    return function


def _is_array(x: Any) -> bool:
    """Whether an option goes through shard_map as an array. Python numbers and None stay static."""
    return hasattr(x, "shape") or isinstance(x, list | tuple)
