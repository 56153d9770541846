"""Map of tensor memory: 512 columns of 128 lanes of 32 bits, allocated whole.

Paired (two query tiles, accumulators of up to 128 columns)::

    0        64       128      192      256            384            512
    | S0 .... P0 ..... | S1 .... P1 .... | O0 .......... | O1 ......... |

Wide (one query tile, an accumulator of up to 256 columns)::

    0                                   256      320   384      448   512
    | O ................................ | S even . P .. | S odd .. P .. |

P (16 bits a probability, KEYS / 2 columns) overwrites the upper half of its own S: the softmax warps have read a whole
row of scores before they write the first probability, and the tensor core starts the next S into the same columns only
after the P V product that reads P.
"""

from __future__ import annotations

from jax_fa4.kernels.sm100.forward.config import KEYS, ForwardConfig

COLUMNS = 512
BASE = 0
"""The address that an allocation of all columns has."""

P_OFFSET = KEYS // 2
"""Columns from the start of an S buffer to its P."""

LANE_SHIFT = 16
"""A tensor-memory address is (lane << 16) + column."""


def scores(config: ForwardConfig, buffer):
    """First column of score buffer ``buffer`` (int or DSL integer): the query stage, or the parity of the block."""
    return buffer * KEYS + (0 if config.paired else 2 * KEYS)


def probabilities(config: ForwardConfig, buffer):
    """First column of the probabilities in score buffer ``buffer``."""
    return scores(config, buffer) + P_OFFSET


def accumulator(config: ForwardConfig, stage: int) -> int:
    """First column of the accumulator of query tile ``stage``."""
    return (2 + stage) * KEYS if config.paired else 0
