"""FlashAttention-4 for JAX."""

from jax_fa4._version import __version__
from jax_fa4.api import attention, attention_with_lse, supports
from jax_fa4.dispatch import FallbackWarning, Support

__all__ = ["FallbackWarning", "Support", "__version__", "attention", "attention_with_lse", "supports"]
