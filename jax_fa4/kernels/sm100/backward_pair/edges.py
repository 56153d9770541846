"""The pipeline between the roles of a pair of CTAs: edges as in the single-CTA kernel's ``edges``, in both CTAs.

One warp, the MMA warp of the pair's first CTA (the leader), issues every product for both. What it waits for are
barriers of the leader, where both CTAs' bytes and warps are counted; what it signals, it signals in both CTAs. Edges
that it takes no part in (stat, send, received) are each CTA's own. Counts are per barrier: one per warp, one for TMA
(the leader expects the bytes of both CTAs) and for ``tcgen05.commit``.

A block of query rows is worked on in one part or two (``config.PairShape``). stat, send, received, exchange, dq, and
the empty side of ds go through one phase a block, the others one a part.

========  ===========  ========  =====================================================================================
edge      producer     consumer  hands over
========  ===========  ========  =====================================================================================
k         load, both   mma       K of each CTA's keys (A of S), once
kt        load, both   mma       K of all the pair's keys, each CTA half of the columns (B of dQ), once
v         load, both   mma       V of each CTA's keys, once
q         load, both   mma       Q of a part, each CTA half of the rows (B of S). Empty: S is complete
qt        load, both   mma       Q of a part, each CTA half of the columns (B of dK). Empty: dK's product is complete
dout      load, both   mma       dO of a part by rows (B of dP). Empty: dP is complete
doutt     load, both   mma       dO of a part by columns (B of dV). Empty: dV's product is complete
stat      load         compute   lse2 and delta of a block, of all its rows in each CTA. Empty: both have been read
s         mma          compute   scores in tensor memory. Empty is implied by p
read      compute x 2  mma       scores are in registers: dQ of the block before may take the tail of their columns
p         compute x 2  mma       probabilities over the head of the scores. The next scores come after the product that
                                 reads them
dp        mma          compute   dP in tensor memory; also says that dK's product of the part before is complete, so
                                 that tensor memory may take dS. Empty is implied by ds
ds        compute x 2  mma       dS over dP in tensor memory, and this CTA's rows in shared memory. Empty: dQ's
                                 product is complete, so that shared memory may take the next dS: what a CTA keeps,
                                 what it sends, and what it receives
send      compute      relay     dS of the peer's rows, in shared memory. Empty is implied by ds
received  peer's relay relay     the same from the peer, by a bulk copy (1 arrival: the relay expects the bytes)
exchange  relay x 2    mma       both CTAs have received
dq        mma          reduce    dQ in tensor memory. Empty: it has been read into registers, in both CTAs
grad      mma          compute   dK and dV, once; all products are complete
========  ===========  ========  =====================================================================================
"""

from __future__ import annotations

from jax_fa4.kernels.sm100.backward.config import STAT_STAGES
from jax_fa4.kernels.sm100.backward.edges import COMPUTE_WARPS
from jax_fa4.kernels.sm100.backward_pair.config import CTAS
from jax_fa4.kernels.sm100.forward.edges import WARPS, EdgeSpec

EDGES = (
    EdgeSpec("k", "load", "mma", 1, full=1, empty=0),
    EdgeSpec("kt", "load", "mma", 1, full=1, empty=0),
    EdgeSpec("v", "load", "mma", 1, full=1, empty=0),
    EdgeSpec("q", "load", "mma", 1, full=1, empty=1),
    EdgeSpec("qt", "load", "mma", 1, full=1, empty=1),
    EdgeSpec("dout", "load", "mma", 1, full=1, empty=1),
    EdgeSpec("doutt", "load", "mma", 1, full=1, empty=1),
    EdgeSpec("stat", "load", "compute", STAT_STAGES, full=1, empty=COMPUTE_WARPS),
    EdgeSpec("s", "mma", "compute", 1, full=1, empty=0),
    EdgeSpec("read", "compute", "mma", 1, full=CTAS * COMPUTE_WARPS, empty=0),
    EdgeSpec("p", "compute", "mma", 1, full=CTAS * COMPUTE_WARPS, empty=0),
    EdgeSpec("dp", "mma", "compute", 1, full=1, empty=0),
    EdgeSpec("ds", "compute", "mma", 1, full=CTAS * COMPUTE_WARPS, empty=1),
    EdgeSpec("send", "compute", "relay", 1, full=COMPUTE_WARPS, empty=0),
    EdgeSpec("received", "relay", "relay", 1, full=1, empty=0),
    EdgeSpec("exchange", "relay", "mma", 1, full=CTAS, empty=0),
    EdgeSpec("dq", "mma", "reduce", 1, full=1, empty=CTAS * WARPS),
    EdgeSpec("grad", "mma", "compute", 1, full=1, empty=0),
)
"""The edges in the order of their barriers in shared memory, the same in both CTAs."""
