"""A decoder-only Transformer over bytes, in flax.nnx.

Attention comes in through ``attention_fn`` of ``nnx.MultiHeadAttention``: that argument is all that a model changes to
use ``jax_fa4``. Positions are rotary (Su et al., RoFormer, 2021), applied to query and key on their way into it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

ROTARY_BASE = 10_000.0
EMBEDDING_STDDEV = 0.02


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes of the model: width = heads * head_dim. ``dtype`` is that of the computation; parameters are float32."""

    vocabulary_size: int = 256
    layers: int = 4
    width: int = 128
    heads: int = 4
    mlp_factor: int = 4
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.width % self.heads or (self.width // self.heads) % 2:
            raise ValueError(
                f"--width ({self.width}) must be an even multiple of --heads ({self.heads}): features turn in pairs"
            )


def rotate(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Rotary position embedding of (..., T, N, H): row t is turned by the angles of ``positions[t]``, in float32."""
    half = x.shape[-1] // 2
    frequencies = ROTARY_BASE ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions.astype(jnp.float32)[:, None, None] * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def with_rotary_positions(
    attention_fn: Callable[..., jax.Array], positions_of: Callable[[int], jax.Array] = jnp.arange
) -> Callable[..., jax.Array]:
    """Wraps an ``attention_fn`` of nnx so that query and key carry their positions.

    ``positions_of`` gives the positions of the tokens of a sequence of some length, in the order of holding.
    """

    def rotary_attention(query: jax.Array, key: jax.Array, value: jax.Array, **arguments) -> jax.Array:
        positions = jnp.asarray(positions_of(query.shape[-3]))
        return attention_fn(rotate(query, positions), rotate(key, positions), value, **arguments)

    return rotary_attention


class Block(nnx.Module):
    """Pre-norm Transformer block: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, attention_fn: Callable[..., jax.Array], rngs: nnx.Rngs):
        dtype = jnp.dtype(config.dtype)
        # Outputs of both branches start small, so that the residual stream does not grow with depth (GPT-2).
        small = nnx.initializers.normal(EMBEDDING_STDDEV / (2 * config.layers) ** 0.5)
        hidden = config.mlp_factor * config.width
        self.attention_norm = nnx.RMSNorm(config.width, dtype=dtype, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            num_heads=config.heads,
            in_features=config.width,
            dtype=dtype,
            use_bias=False,
            out_kernel_init=small,
            attention_fn=attention_fn,
            decode=False,
            rngs=rngs,
        )
        self.mlp_norm = nnx.RMSNorm(config.width, dtype=dtype, rngs=rngs)
        self.mlp_in = nnx.Linear(config.width, hidden, use_bias=False, dtype=dtype, rngs=rngs)
        self.mlp_out = nnx.Linear(hidden, config.width, use_bias=False, dtype=dtype, kernel_init=small, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps (B, T, width) to the same shape."""
        x = x + self.attention(self.attention_norm(x), is_causal=True)
        return x + self.mlp_out(nnx.gelu(self.mlp_in(self.mlp_norm(x))))


class ByteLM(nnx.Module):
    """Byte-level language model; input and output embeddings are tied."""

    def __init__(
        self,
        config: ModelConfig,
        attention_fn: Callable[..., jax.Array],
        rngs: nnx.Rngs,
        place: Callable[[jax.Array], jax.Array] = lambda x: x,
    ):
        self._place = place  # says where activations (B, T, width) live on a mesh
        self.embed = nnx.Embed(
            config.vocabulary_size,
            config.width,
            dtype=jnp.dtype(config.dtype),
            embedding_init=nnx.initializers.normal(EMBEDDING_STDDEV),
            rngs=rngs,
        )
        self.blocks = nnx.List([Block(config, attention_fn, rngs) for _ in range(config.layers)])
        self.final_norm = nnx.RMSNorm(config.width, dtype=jnp.dtype(config.dtype), rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Maps int32 tokens (B, T) to float32 logits (B, T, vocabulary): position t predicts byte t + 1."""
        x = self._place(self.embed(tokens))
        for block in self.blocks:
            x = self._place(block(x))
        return self.embed.attend(self.final_norm(x)).astype(jnp.float32)
