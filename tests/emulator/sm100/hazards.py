"""Static check of tcgen05.ld: which registers are used before a tcgen05.wait::ld covers them.

ptxas tracks the registers of a load, so shipped kernels get away with it; PTX gives them no value before the wait.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.emulator.cfg import Flow


def uses_before_wait(flow: Flow) -> list[tuple[int, int]]:
    """(line of the use, line of the load) for every use or overwrite of a pending register, in order of lines."""
    code = flow.kernel.instructions
    found: set[tuple[int, int]] = set()
    pending_in: list[dict[int, int]] = [{} for _ in flow.blocks]  # register bit -> line of its load
    todo = list(range(len(flow.blocks)))
    while todo:
        number = todo.pop()
        block = flow.blocks[number]
        pending = dict(pending_in[number])
        for index in range(block.start, block.stop):
            ins = code[index]
            defs, uses = flow.du[index]
            if ins.parts[:2] == ("tcgen05", "wait::ld"):
                pending.clear()
                continue
            if pending:
                for register in (*uses, *defs):
                    if register in pending:
                        found.add((ins.line, pending.pop(register)))
            if ins.parts[:2] == ("tcgen05", "ld"):
                pending.update(dict.fromkeys(defs, ins.line))
        for successor in block.successors:
            if successor < len(flow.blocks):
                known = pending_in[successor]
                size = len(known)
                for register, line in pending.items():
                    known.setdefault(register, line)
                if len(known) != size:
                    todo.append(successor)
    return sorted(found)
