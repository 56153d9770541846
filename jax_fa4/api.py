"""The public functions: argument defaults, and what becomes of the results."""

from __future__ import annotations

import inspect
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike

from jax_fa4 import dispatch
from jax_fa4.arguments import Arguments, check
from jax_fa4.dispatch import Support
from jax_fa4.vjp import attend


@overload
def attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = ...,
    mask: ArrayLike | None = ...,
    *,
    scale: ArrayLike | None = ...,
    is_causal: bool = ...,
    query_seq_lengths: ArrayLike | None = ...,
    key_value_seq_lengths: ArrayLike | None = ...,
    local_window_size: int | tuple[int | None, int | None] | None = ...,
    implementation: str | None = ...,
    return_residual: Literal[False] = ...,
    query_segment_ids: ArrayLike | None = ...,
    key_value_segment_ids: ArrayLike | None = ...,
    logits_soft_cap: float | None = ...,
    sinks: ArrayLike | None = ...,
    query_offset: ArrayLike = ...,
    deterministic: bool = ...,
) -> Array: ...


@overload
def attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = ...,
    mask: ArrayLike | None = ...,
    *,
    scale: ArrayLike | None = ...,
    is_causal: bool = ...,
    query_seq_lengths: ArrayLike | None = ...,
    key_value_seq_lengths: ArrayLike | None = ...,
    local_window_size: int | tuple[int | None, int | None] | None = ...,
    implementation: str | None = ...,
    return_residual: Literal[True],
    query_segment_ids: ArrayLike | None = ...,
    key_value_segment_ids: ArrayLike | None = ...,
    logits_soft_cap: float | None = ...,
    sinks: ArrayLike | None = ...,
    query_offset: ArrayLike = ...,
    deterministic: bool = ...,
) -> tuple[Array, Array]: ...


def attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: ArrayLike | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
    query_segment_ids: ArrayLike | None = None,
    key_value_segment_ids: ArrayLike | None = None,
    logits_soft_cap: float | None = None,
    sinks: ArrayLike | None = None,
    query_offset: ArrayLike = 0,
    deterministic: bool = True,
) -> Array | tuple[Array, Array]:
    """Exact attention, ``softmax(scale * query @ key^T + bias) @ value`` under a mask.

    A drop-in replacement for :func:`jax.nn.dot_product_attention`, whose arguments keep their meaning. B is the batch
    size, T and S the query and key lengths, N the number of query heads, K the number of key heads (N a multiple of
    K), H and Hv the head dimensions. Each score is computed as: scale, add bias, soft cap, mask.

    Args:
      query: (B, T, N, H) or (T, N, H); float32, bfloat16, float16 or float64.
      key: (B, S, K, H) or (S, K, H), of query's dtype.
      value: (B, S, K, Hv) or (S, K, Hv), of query's dtype.
      bias: broadcastable to (B, N, T, S); added to the scaled scores in float32.
      mask: bool, broadcastable to (B, N, T, S); True attends.
      scale: real scalar, may be traced and differentiated; 1 / sqrt(H) by default.
      is_causal: key j is visible to query i only if j <= i + query_offset.
      query_seq_lengths: int32 (B,). Rows at or past the length give 0.
      key_value_seq_lengths: int32 (B,). Keys at or past the length are invisible.
      local_window_size: (left, right), or one int for both: key j is visible to query i only if
        i + query_offset - left <= j <= i + query_offset + right. None on a side leaves it open.
      implementation: "fa4" (the kernels), "blockwise" (XLA, O(T + S) memory), "xla" (plain XLA; also forward-mode and
        second derivatives), "cudnn" (jax.nn's), or None for the best that serves the call, see
        :func:`jax_fa4.dispatch.decide`.
      return_residual: also return the log-sum-exp as jax.nn does: (B, T, N) in key's dtype, without gradient.
      query_segment_ids, key_value_segment_ids: integers (B, T) and (B, S); a query sees keys of its own id only.
      logits_soft_cap: scores become cap * tanh(score / cap). A Python number > 0.
      sinks: floating (N,); a score per head that joins the softmax's denominator without a value of its own.
      query_offset: position of the first query relative to the first key: an int, or int32 () or (B,), may be traced.
      deterministic: gradients are bitwise the same, run after run. False may be faster.

    Returns:
      (B, T, N, Hv), or (T, N, Hv) if query has no batch axis, in query's dtype; with ``return_residual`` a pair with
      the residual. A row that sees no key gives 0 with log-sum-exp -inf (or its sink) and gradients 0; plain jax.nn
      averages value there.

    Raises:
      ValueError, TypeError: an argument is illegal, or the named implementation cannot serve the call. At trace time.
    """
    kwargs = dict(
        scale=scale,
        is_causal=is_causal,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        local_window_size=local_window_size,
        query_segment_ids=query_segment_ids,
        key_value_segment_ids=key_value_segment_ids,
        logits_soft_cap=logits_soft_cap,
        sinks=sinks,
        query_offset=query_offset,
        deterministic=deterministic,
    )
    arguments = check(query, key, value, bias, mask, **kwargs)
    if implementation == dispatch.CUDNN:
        return _cudnn(arguments, return_residual)
    out, lse = _run(arguments, implementation)
    if not return_residual:
        return out
    residual = lax.stop_gradient(jnp.swapaxes(lse, -1, -2).astype(arguments.operands.key.dtype))
    return out, residual


def attention_with_lse(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: ArrayLike | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    implementation: str | None = None,
    query_segment_ids: ArrayLike | None = None,
    key_value_segment_ids: ArrayLike | None = None,
    logits_soft_cap: float | None = None,
    sinks: ArrayLike | None = None,
    query_offset: ArrayLike = 0,
    deterministic: bool = True,
) -> tuple[Array, Array]:
    """Attention and the log-sum-exp of its scores, differentiable in both.

    Arguments and errors as for :func:`attention`.

    Returns:
      out as :func:`attention` returns it, and lse, float32 (B, N, T), or (N, T) if query has no batch axis: the
      natural logarithm of the softmax's denominator (float64 for float64 operands), -inf for rows that see nothing.
      Two results over disjoint keys merge by their lse.
    """
    kwargs = dict(
        scale=scale,
        is_causal=is_causal,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        local_window_size=local_window_size,
        query_segment_ids=query_segment_ids,
        key_value_segment_ids=key_value_segment_ids,
        logits_soft_cap=logits_soft_cap,
        sinks=sinks,
        query_offset=query_offset,
        deterministic=deterministic,
    )
    arguments = check(query, key, value, bias, mask, **kwargs)
    if implementation == dispatch.CUDNN:
        raise ValueError("implementation='cudnn' has no log-sum-exp with a gradient; use 'fa4', 'blockwise' or 'xla'")
    return _run(arguments, implementation)


def supports(*args: Any, **kwargs: Any) -> Support:
    """Which implementation would serve a call, and why the others would not.

    Takes the arguments of :func:`attention`; arrays may be ``jax.ShapeDtypeStruct``. Computes nothing.

    Returns:
      A :class:`Support`.

    Raises:
      ValueError, TypeError: an argument is illegal, or the implementation's name unknown.
    """
    bound = inspect.signature(attention).bind(*args, **kwargs)
    bound.apply_defaults()
    given = dict(bound.arguments)
    requested = given.pop("implementation")
    given.pop("return_residual")
    abstract = {name: x for name, x in given.items() if isinstance(x, jax.ShapeDtypeStruct)}
    concrete = {name: x for name, x in given.items() if name not in abstract}
    result: list[Support] = []

    def decide(arrays: dict[str, Array]) -> None:
        arguments = check(**concrete, **arrays)
        result.append(dispatch.support(arguments.config, arguments.operands, requested, _cudnn_reasons(arguments)))

    jax.eval_shape(decide, abstract)
    return result[0]


def _run(arguments: Arguments, implementation: str | None) -> tuple[Array, Array]:
    decision = dispatch.decide(arguments.config, arguments.operands, implementation)
    dispatch.warn_of_fallback(decision, stacklevel=3)
    out, lse = attend(decision.implementation, arguments.config, arguments.operands)
    return (out, lse) if arguments.batched else (out[0], lse[0])


def _cudnn_reasons(arguments: Arguments) -> list[str]:
    """What jax.nn.dot_product_attention has no argument for."""
    config, operands, _ = arguments
    absent = {
        "query_segment_ids and key_value_segment_ids": operands.query_segment_ids is not None,
        "logits_soft_cap": config.logits_soft_cap is not None,
        "sinks": operands.sinks is not None,
        "query_offset": operands.query_offset is not None or config.query_offset != 0,
        "a traced scale": config.scale is None,
        "a window that is open on the left but not causal, or open on the right": config.mask_kind == "window"
        and (config.window_left is None or config.window_right is None),
        "deterministic=True (cuDNN's backward has no fixed order; pass deterministic=False)": config.deterministic,
    }
    reasons = [f"jax.nn.dot_product_attention cannot take {name}" for name, given in absent.items() if given]
    if operands.value.shape != operands.key.shape:
        reasons.append(f"value's shape {operands.value.shape} must equal key's {operands.key.shape}")
    return reasons


def _cudnn(arguments: Arguments, return_residual: bool) -> Array | tuple[Array, Array]:
    reasons = _cudnn_reasons(arguments)
    if reasons:
        raise ValueError("implementation='cudnn' cannot serve this call:" + "".join(f"\n  - {r}" for r in reasons))
    config, operands, batched = arguments
    causal = config.window_right == 0
    window = None if config.window_left is None else (config.window_left, config.window_right or 0)
    run: Any = jax.nn.dot_product_attention  # its overloads know no bool that is not a literal
    result = run(
        operands.query,
        operands.key,
        operands.value,
        operands.bias,
        operands.mask,
        scale=config.scale,
        is_causal=causal,
        query_seq_lengths=operands.query_lengths,
        key_value_seq_lengths=operands.key_value_lengths,
        local_window_size=window,
        implementation="cudnn",
        return_residual=return_residual,
    )
    return result if batched else jax.tree.map(lambda x: x[0], result)
