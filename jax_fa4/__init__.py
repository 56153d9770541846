"""FlashAttention-4 for JAX."""

from jax_fa4.api import attention, attention_with_lse, supports
from jax_fa4.dispatch import FallbackWarning, Support

__all__ = ["FallbackWarning", "Support", "attention", "attention_with_lse", "supports"]
