"""The seam for sm_100: emitters of the tcgen05 instructions register here, the unit that carries them out is beside.

How an instruction is added
    Decorate a function with ``@opcode("tcgen05.ld")`` (dotted prefix; the longest match wins). It gets the translator
    ``t`` and the instruction ``ins`` (``ins.parts``: the opcode split at dots; ``ins.operands``: see ptx.py) and
    emits Python with ``t.line``. Useful: ``t.at(ins)`` first (the PTX line for reports); ``t.line("yield")`` before
    anything that synchronises or starts asynchronous work; ``t.scalar(operand, "u" | "U")`` for an operand that must
    be the same in all lanes; ``t.value(operand, kind)`` for 32 lanes; ``t.set(destination, expression, kind,
    uniform)`` for results (kinds: kinds.py); ``emit_memory.address(t, operand)`` for ``[base+offset]``;
    ``emit_sync.wait(t, begin, again)`` for blocking calls; ``t.mask`` is the name of the active-lane mask. Runtime
    functions that the emitted code calls are put into ``translate.ENVIRONMENT`` by name (see the top of launch.py).
    Destinations of ``tcgen05.ld`` already count as varying and as asynchronously written (``mov`` copies them instead
    of sharing the array): cfg.py, translate.py.

How asynchronous work completes
    Make an ``operations.Operation`` (its constructor takes the issuing warp, gives the operation a column of the
    vector clocks and snapshots the issuer's clock), then call ``issue()``; the scheduler calls ``run()`` at a time
    that the adversary picks; ``run`` returns True when finished, and must call ``close()``. Work that must stay in
    order (MMAs of a CTA) goes into one queue action like ``wgmma.Queue``. Completion is published to an mbarrier by
    ``operation.signal(cta, offset, nbytes)`` (complete_tx) or ``operation.arrive(cta, offset)`` (tcgen05.commit). An
    operation that is ordered after another by the pipeline joins its clock: ``race.join(operation.clocks,
    other.clocks)``. A warp that waits joins the clocks of what it waited for; blocking uses a ``sync.Waitable`` whose
    waiters ``machine.changed(waitable)`` wakes.

How the race detector is told
    Shared memory: ``region.shadow.read(granules, operation.accessor, line)`` (``matrix.granule_table`` and
    ``Operation.read_bytes`` show how). Tensor memory: a ``race.Shadow("TMEM", 4 * cells, columns, row, True)`` per
    CTA with one granule per (lane, column) cell works unchanged; accesses by warps use ``warp.generic``, those by
    operations their accessor. ``shadow`` is None when detection is off.

Units of a CTA live in ``cta.units[name]``; ``unit.finish()`` is called when the CTA's last warp has exited (leaks).
Cluster mates: ``cta.cluster[rank]``; the peer of a CTA pair has rank ``cta.rank ^ 1``.
"""

from __future__ import annotations
