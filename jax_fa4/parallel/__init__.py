"""Attention over sequences that are split over the devices of a mesh."""

from jax_fa4.parallel.api import all_gather_attention, ring_attention, ulysses_attention
from jax_fa4.parallel.layout import from_layout, positions, to_layout
from jax_fa4.parallel.mesh import make_attention

__all__ = [
    "all_gather_attention",
    "from_layout",
    "make_attention",
    "positions",
    "ring_attention",
    "to_layout",
    "ulysses_attention",
]
