"""Static check of wgmma.fence: registers of a product that other instructions accessed after the last fence.

PTX: the fence must come before the first ``wgmma.mma_async``, and between any other access to a register and a product
that has it in its accumulator or in operand A. Products may follow one another on the same accumulator.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .cfg import registers

if TYPE_CHECKING:
    from .cfg import Flow


NO_FENCE = -1  # in place of a register: the kernel's entry, after which a fence has to come


def accesses_after_fence(flow: Flow) -> list[tuple[int, int]]:
    """(line of the product, line of the access, 0 for the entry) for every access on some path, in order of lines."""
    code = flow.kernel.instructions
    found: set[tuple[int, int]] = set()
    touched_in: list[dict[int, int]] = [{} for _ in flow.blocks]  # register bit -> line of an access
    operands: dict[int, set[int]] = {}
    for index, ins in enumerate(code):
        if ins.parts[:2] == ("wgmma", "mma_async"):
            names: list[str] = []
            for operand in ins.operands[:2]:
                if operand[0] == "v":  # the accumulator; operand A unless it is a descriptor
                    registers(operand, names)
            operands[index] = {NO_FENCE, *(flow.index[name] for name in names)}
    if not operands:
        return []
    relevant = set().union(*operands.values())
    touched_in[0][NO_FENCE] = 0
    todo = list(range(len(flow.blocks)))
    while todo:
        number = todo.pop()
        block = flow.blocks[number]
        touched = dict(touched_in[number])
        for index in range(block.start, block.stop):
            ins = code[index]
            if index in operands:
                found.update((ins.line, touched[register]) for register in operands[index] & touched.keys())
            elif ins.parts[:2] == ("wgmma", "fence"):
                touched.clear()
            else:
                for register in (*flow.du[index][0], *flow.du[index][1]):
                    if register in relevant:
                        touched[register] = ins.line
        for successor in block.successors:
            if successor < len(flow.blocks):
                known = touched_in[successor]
                size = len(known)
                for register, line in touched.items():
                    known.setdefault(register, line)
                if len(known) != size:
                    todo.append(successor)
    return sorted(found)
