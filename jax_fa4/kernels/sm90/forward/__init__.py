"""Hopper forward kernel: out = softmax(scale * Q K^T + mask) V, with LSE.

Data flow of one CTA (one producer warpgroup, ``warpgroups`` consumer warpgroups of 64 query rows each)::

    Q  global --TMA--> SMEM (one slot per consumer warpgroup)  --wgmma A--> S   registers
    K  global --TMA--> SMEM (ring of ``stages`` blocks)        --wgmma B--> S
    S  registers --mask, maximum, exp2--> P registers (16 bit) --wgmma A--> O   registers
    V  global --TMA--> SMEM (ring of ``stages`` blocks)        --wgmma B--> O
    O  registers --normalise, stmatrix--> SMEM (slot of its own, or the Q slot if space is short) --TMA--> global
    LSE registers --> global

Edges (producer -> consumer, barrier, arrivals that complete a phase)::

    q_full[w]   loader thread -> warpgroup w     mbarrier, 1 + bytes of the Q slot
    q_empty[w]  warpgroup w -> loader thread     mbarrier, 4 (one lane of each warp, after its last QK wgmma), or where
                                                 O shares the slot 1 (the thread that saw the O store read it)
    k_full[s]   loader thread -> all warpgroups  mbarrier, 1 + bytes of a K block
    k_empty[s]  all warpgroups -> loader thread  mbarrier, 4 per warpgroup (one lane of each warp, after its QK wgmma)
    v_full[s], v_empty[s]                        the same for V, after the PV wgmma
    turn[w]     warpgroup w-1 -> warpgroup w     named barrier, 256: w may issue its wgmmas (ping-pong)
    store[w]    within warpgroup w               named barrier, 128: the O slot is free; O is in SMEM

Order in a consumer warpgroup: the QK product of the next block and the PV product of this one are in flight while the
softmax of the next block runs; with ping-pong the warpgroups take turns in issuing, so that one's softmax runs under
another's products. Blocks that need no mask use the optimistic softmax (:mod:`.softmax`), which computes no maximum
and starts when both products are done. Each role walks the same work list
(:mod:`jax_fa4.kernels.common.tile_order`) and the same block ranges (:mod:`jax_fa4.kernels.common.block_range`). Q is
loaded for every tile, also for one without key blocks: a shared slot would otherwise be refilled while zeros are
stored from it.
"""
