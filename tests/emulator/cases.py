"""Attention calls that several tests share: what the long modes and the comparison with a GPU need kernels for."""

from .attention import ForwardCase

LENGTHS = ((130, 190, 0), (93, 161, 5), (0, 0, 0), (1, 64, 63))
SM90_CASES = [
    *(
        ForwardCase(150, 200, head_dim, heads=2, mask=mask, left=40, right=10)
        for head_dim in (64, 128, 256)
        for mask in ("none", "causal", "window")
    ),
    *(
        ForwardCase(130, 190, 64, batch=4, heads=2, kv_heads=2, mask=mask, lengths=LENGTHS, left=30, right=5)
        for mask in ("none", "causal", "window")
    ),
    ForwardCase(100, 260, 128, heads=4, mask="causal", pack_gqa=True, query_offset=160),
    ForwardCase(70, 129, 64, heads=6, kv_heads=2, mask="none", pack_gqa=True),
    ForwardCase(64, 1, 64),
    ForwardCase(1, 1, 64, mask="causal"),
    ForwardCase(3, 3, 128),
    ForwardCase(300, 300, 72, mask="causal"),
    ForwardCase(113, 203, 104),
    ForwardCase(200, 100, 128, 64, mask="causal", query_offset=-60),
    ForwardCase(200, 400, 128, ramp=0.05),
    ForwardCase(129, 130, 192, 128, dtype="float16", mask="causal"),
    ForwardCase(90, 300, 64, mask="window", left=-100, right=200, query_offset=37),
    ForwardCase(500, 300, 64, heads=3, kv_heads=3, mask="causal", multiprocessors=2),
    # Last blocks that are full on the right and cut on the left; an odd number of heads; maxima that fall and rise.
    ForwardCase(200, 128, 128, heads=2, mask="window", left=5),
    ForwardCase(385, 385, 64, heads=3, kv_heads=3, mask="causal", multiprocessors=1, ramp=-0.002),
    ForwardCase(400, 200, 128, heads=2, tile=(192, 80), multiprocessors=1, ramp=0.05),
]
"""Forward calls that reach every variant of the Hopper kernel; on a GPU the same calls check the emulator."""

SM90_FAULTS = [
    ForwardCase(500, 420, 64, mask="causal", multiprocessors=1, ramp=0.01),
    ForwardCase(200, 300, 64, mask="causal", multiprocessors=1, heads=3, query_offset=-150, ramp=-0.01),
]
"""Several tiles in one CTA, several key blocks each, moving maxima: every buffer and phase is used again. The second
case has tiles without keys. One kernel serves all of them."""
SM90_ROWS = ForwardCase(190, 420, 64, mask="causal", query_offset=230, ramp=-0.02)
"""Scores that grow from block to block, in rows that see all blocks but the last few keys."""
SM90_CLEAN = [ForwardCase(280, 300, 64, mask=mask, multiprocessors=1) for mask in ("none", "causal")]
SM90_BACKWARD_CLEAN = [ForwardCase(270, 300, 64, heads=2, kv_heads=1, mask=mask) for mask in ("none", "causal")]
SM100_FAULTS = [
    ForwardCase(130, keys, 128, heads=heads, multiprocessors=1, ramp=0.01, arch="sm_100f")
    for keys, heads in ((300, 3), (100, 5), (200, 4))
]
"""Several tiles in one CTA with three, one and two key blocks each, a ring that wraps, moving maxima."""
SM100_BACKWARD_FAULTS = ForwardCase(270, 300, 64, heads=2, kv_heads=1, arch="sm_100f")
SM100_PAIR_FAULTS = ForwardCase(270, 256, 128, arch="sm_100f")
"""One pair of CTAs, three steps: the exchange of dS goes through both phases of its barriers and round again."""
SM100_WIDE_PAIR_FAULTS = ForwardCase(270, 256, 192, 128, arch="sm_100f")
"""The same where the CTAs take turns in sending."""
