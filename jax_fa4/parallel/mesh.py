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
from jax_fa4.parallel.api import Options, all_gather_attention, ring_attention, ulysses_attention

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
      ``function(query, key, value, **options)`` for query (B, T, N, H), key (B, S, K, H) and value (B, S, K, Hv); the
      options are :class:`jax_fa4.parallel.api.Options` with global arrays. For use inside or outside jit.

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

    def function(query: ArrayLike, key: ArrayLike, value: ArrayLike, **options: Any) -> Any:
        operands = {name: jnp.asarray(x) for name, x in (("query", query), ("key", key), ("value", value))}
        for name, x in operands.items():
            if x.ndim != 4:
                raise ValueError(f"{name}: got shape {x.shape}; expected 4 dimensions, (B, length, heads, head_dim)")
            check_divides(name, x)
        unknown = sorted(options.keys() - Options.__annotations__.keys())
        if unknown:
            raise TypeError(f"{', '.join(unknown)}: unknown keyword; expected {', '.join(Options.__annotations__)}")
        arrays = {name: x for name, x in options.items() if _is_array(name, x)}
        static = {name: x for name, x in options.items() if name not in arrays}

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


def _is_array(name: str, x: Any) -> bool:
    """Whether an option goes through shard_map as an array. Python numbers stay static."""
    return (
        x is not None
        and name not in ("is_causal", "local_window_size", "logits_soft_cap", "deterministic")
        and (hasattr(x, "shape") or isinstance(x, list | tuple))
    )
