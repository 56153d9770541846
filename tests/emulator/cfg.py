"""Control flow of one kernel: basic blocks, liveness, post-dominators; which registers are uniform in a warp.

A warp runs both sides of a branch whose predicate differs between lanes one after the other and reconverges at the
branch's immediate post-dominator. A register is *uniform* when its value is the same for all lanes that execute: it is
then held as one Python scalar. It may be uniform only if no divergent branch lets lanes leave with different
definitions of it, so uniformity and divergence are solved together, starting from "everything is uniform".
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cache

from .ptx import Instruction, Kernel

NO_DESTINATION = {
    "st", "red", "bra", "ret", "exit", "trap", "brkpt", "fence", "membar", "nanosleep", "setmaxnreg", "cp", "wgmma",
    "griddepcontrol", "prefetch", "prefetchu", "discard", "bar", "barrier", "stmatrix", "call", "applypriority",
    "pmevent", "multimem",
}  # fmt: skip
_ALWAYS_VARYING = {"atom", "ldmatrix", "movmatrix", "mma"}
_LANE_SPECIAL = ("%tid", "%laneid", "%lanemask")


def registers(operand: tuple, out: list[str]) -> None:
    """Appends the names of all registers in an operand (special registers too)."""
    form = operand[0]
    if form == "r":
        out.append(operand[1])
    elif form in ("v", "m"):
        for inner in operand[1]:
            registers(inner, out)
    elif form in ("+", "!"):
        registers(operand[1], out)
    elif form == "|":
        registers(operand[1], out)
        registers(operand[2], out)


_SPECIAL = re.compile(
    r"%(n?tid|n?ctaid|n?clusterid|cluster_n?ctaid|cluster_n?ctarank|is_explicit_cluster|laneid|n?warpid|n?smid|gridid"
    r"|lanemask_\w+|clock(_hi|64)?|globaltimer\w*|pm\d+|envreg\d+|\w+_smem_(size|offset\w*)|current_graph_exec)(\.[xyz])?"
)
"""The names that PTX reserves; every other name is the program's, whether or not it begins with %."""


@cache
def is_special(name: str) -> bool:
    return name.startswith("%") and _SPECIAL.fullmatch(name) is not None


def has_destination(ins: Instruction) -> bool:
    parts, base = ins.parts, ins.parts[0]
    if not ins.operands:
        return False
    if base in ("bar", "barrier"):
        return "red" in parts
    if base == "tcgen05":
        return parts[1] == "ld"
    if base == "clusterlaunchcontrol":
        return parts[1] == "query_cancel"
    if base in NO_DESTINATION:
        return False
    return ins.operands[0][0] in ("r", "v", "|", "_")


def definitions_and_uses(ins: Instruction) -> tuple[list[str], list[str]]:
    """Registers that the instruction writes and reads (special registers excluded)."""
    defs: list[str] = []
    uses: list[str] = []
    operands = ins.operands
    if has_destination(ins):
        registers(operands[0], defs)
        rest = operands[1:]
    elif ins.parts[:2] == ("wgmma", "mma_async"):
        registers(operands[0], defs)
        uses.extend(defs)
        rest = operands[1:]
    else:
        rest = operands
    for operand in rest:
        registers(operand, uses)
    if ins.guard:
        uses.append(ins.guard[0])
        uses.extend(defs)
    if len(defs) + len(uses) < 40:
        defs = [d for d in defs if not is_special(d)]
        uses = [u for u in uses if not is_special(u)]
    return defs, uses


@dataclass
class Block:
    """Instructions [start, stop) with successor block numbers; ``branch`` is the closing conditional branch."""

    start: int
    stop: int
    successors: list[int] = field(default_factory=list)
    live_in: int = 0
    live_out: int = 0
    divergent: bool = False  # may run with part of the lanes
    escapes: int = 0  # registers whose definition here must be blended into the lanes' old values


class Flow:
    """Blocks of a kernel with everything that translation needs to know.

    ``uniform(name)`` tells whether a register is held as a scalar. ``reconvergence[b]`` is the block where the lanes
    that part at the end of block ``b`` meet (``exit_block`` if only at the end).
    """

    def __init__(self, kernel: Kernel, one_dimensional: bool, varying: tuple[str, ...] = ()):
        self.kernel, self.one_dimensional, self.forced = kernel, one_dimensional, varying
        self.index: dict[str, int] = {}
        self.du = [self._indexed(ins) for ins in kernel.instructions]
        self._blocks()
        self._liveness()
        self._postdominators()
        self._solve()

    def _bit(self, name: str) -> int:
        found = self.index.get(name)
        if found is None:
            found = self.index[name] = len(self.index)
        return found

    def _indexed(self, ins: Instruction) -> tuple[list[int], list[int]]:
        defs, uses = definitions_and_uses(ins)
        return [self._bit(d) for d in defs], [self._bit(u) for u in uses]

    def _blocks(self) -> None:
        code, labels = self.kernel.instructions, self.kernel.labels
        starts = {0, *labels.values()}
        for i, ins in enumerate(code):
            if ins.parts[0] in ("bra", "ret", "exit", "trap"):
                starts.add(i + 1)
        order = sorted(s for s in starts if s < len(code))
        self.blocks = [Block(s, e) for s, e in zip(order, order[1:] + [len(code)], strict=True)]
        self.exit_block = len(self.blocks)
        at = {b.start: n for n, b in enumerate(self.blocks)}
        at[len(code)] = self.exit_block
        self.block_at = at
        for n, block in enumerate(self.blocks):
            last = code[block.stop - 1]
            if last.parts[0] == "bra":
                block.successors.append(at[labels[last.operands[0][1]]])
                if last.guard:
                    block.successors.append(n + 1)
            elif last.parts[0] in ("ret", "exit"):
                block.successors.append(self.exit_block)
                if last.guard:
                    block.successors.append(n + 1)
            elif last.parts[0] == "trap":
                if last.guard:
                    block.successors.append(n + 1)
            else:
                block.successors.append(n + 1)

    def _liveness(self) -> None:
        use, define = [], []
        for block in self.blocks:
            used = defined = 0
            for i in range(block.start, block.stop):
                d, u = self.du[i]
                for r in u:
                    if not defined >> r & 1:
                        used |= 1 << r
                for r in d:
                    defined |= 1 << r
            use.append(used)
            define.append(defined)
        self.defined = define
        changed = True
        while changed:
            changed = False
            for n in range(len(self.blocks) - 1, -1, -1):
                block = self.blocks[n]
                out = 0
                for s in block.successors:
                    if s < self.exit_block:
                        out |= self.blocks[s].live_in
                live = use[n] | (out & ~define[n])
                if live != block.live_in or out != block.live_out:
                    block.live_in, block.live_out, changed = live, out, True

    def _postdominators(self) -> None:
        count = self.exit_block + 1
        everything = (1 << count) - 1
        sets = [everything] * count
        sets[self.exit_block] = 1 << self.exit_block
        changed = True
        while changed:
            changed = False
            for n in range(count - 2, -1, -1):
                meet = everything
                for s in self.blocks[n].successors:
                    meet &= sets[s]
                new = meet | 1 << n
                if new != sets[n]:
                    sets[n], changed = new, True
        sizes = [s.bit_count() for s in sets]
        self.ipdom = []
        for n in range(self.exit_block):
            strict = sets[n] & ~(1 << n)
            best, best_size = self.exit_block, -1
            if sets[n] != everything:
                while strict:
                    low = strict & -strict
                    m = low.bit_length() - 1
                    strict ^= low
                    if sizes[m] > best_size:
                        best, best_size = m, sizes[m]
            self.ipdom.append(best)

    def _reach(self, start: int, stop: int) -> set[int]:
        """Blocks reachable from ``start`` without entering ``stop``."""
        seen: set[int] = set()
        todo = [start]
        while todo:
            n = todo.pop()
            if n in seen or n in (stop, self.exit_block):
                continue
            seen.add(n)
            todo.extend(self.blocks[n].successors)
        return seen

    def _rule(self, ins: Instruction, varying: int, uses: list[int]) -> bool | None:
        """Whether the results differ between lanes; None means "as soon as an input does"."""
        parts, base = ins.parts, ins.parts[0]
        if base in _ALWAYS_VARYING or ins.parts[:2] in (("tcgen05", "ld"), ("wgmma", "mma_async")):
            return True
        if base in ("vote", "redux", "activemask") or (base == "match" and "all" in parts):
            return False
        if base == "match" or parts[-1] == "f32x2" or (base == "ld" and "local" in parts):
            return True
        if base == "shfl" and "idx" in parts and ins.operands[3] in (("i", 31), ("i", 0x1F)):
            lane: list[str] = []
            registers(ins.operands[2], lane)
            return any(varying >> self.index[r] & 1 for r in lane)
        if base == "shr" and self.one_dimensional and ins.operands[2][0] == "i" and ins.operands[2][1] >= 5:
            name = ins.operands[1][1] if ins.operands[1][0] == "r" else None
            if name in self.thread_index:
                return False
        return None

    def _special(self, ins: Instruction) -> bool:
        names: list[str] = []
        for operand in ins.operands[1:]:
            registers(operand, names)
        for name in names:
            if name.startswith(_LANE_SPECIAL):
                if self.one_dimensional and name in ("%tid.y", "%tid.z"):
                    continue
                return True
        return False

    def _solve(self) -> None:
        code = self.kernel.instructions
        counts: dict[str, int] = {}
        for ins in code:
            if has_destination(ins) and ins.operands[0][0] == "r":
                counts[ins.operands[0][1]] = counts.get(ins.operands[0][1], 0) + 1
        self.thread_index = {
            ins.operands[0][1]
            for ins in code
            if ins.parts[0] == "mov" and ins.operands[1] == ("r", "%tid.x") and counts[ins.operands[0][1]] == 1
        }
        varying = 0
        for name in self.forced:  # registers that are always held as arrays
            varying |= 1 << self._bit(name)
        self.reconvergence: dict[int, int] = {}
        special = [ins.parts[0] in ("mov", "cvt", "add") and self._special(ins) for ins in code]
        elect = [ins.parts[0] == "elect" for ins in code]
        changed = True
        while changed:
            changed = False
            before = varying
            for i, ins in enumerate(code):
                defs, uses = self.du[i]
                if not defs:
                    continue
                rule = True if special[i] else self._rule(ins, varying, uses)
                if rule is None:
                    rule = any(varying >> u & 1 for u in uses)
                elif not rule and ins.guard:
                    rule = bool(varying >> self.index[ins.guard[0]] & 1)
                if elect[i]:
                    varying |= 1 << defs[-1]
                elif rule:
                    for d in defs:
                        varying |= 1 << d
            for n in range(self.exit_block):
                last = code[self.blocks[n].stop - 1]
                conditional = last.guard and last.parts[0] in ("bra", "ret", "exit", "trap")
                if conditional and n not in self.reconvergence and varying >> self.index[last.guard[0]] & 1:  # type: ignore[index]
                    self._diverge(n)
                    changed = True
            for block in self.blocks:
                varying |= block.escapes & self._all_defined(block)
            changed = changed or varying != before
        self.varying = varying

    def _all_defined(self, block: Block) -> int:
        defined = 0
        for i in range(block.start, block.stop):
            for r in self.du[i][0]:
                defined |= 1 << r
        return defined

    def _diverge(self, n: int) -> None:
        """Marks the region of a divergent branch: its blocks may be partial, some of their results must be blended."""
        meet = self.ipdom[n]
        self.reconvergence[n] = meet
        live_at_meet = self.blocks[meet].live_in if meet < self.exit_block else 0
        successors = self.blocks[n].successors
        sides = [self._reach(s, meet) for s in successors]
        for side in sides:
            for b in side:
                self.blocks[b].divergent = True
                self.blocks[b].escapes |= live_at_meet
        if len(sides) == 2:
            for side, other in ((0, 1), (1, 0)):
                if successors[other] not in (meet, self.exit_block):
                    live = self.blocks[successors[other]].live_in
                    for b in sides[side]:
                        self.blocks[b].escapes |= live

    def uniform(self, name: str) -> bool:
        return not self.varying >> self.index[name] & 1 if name in self.index else True

    def escaping(self, block: Block, name: str) -> bool:
        return bool(block.divergent and block.escapes >> self.index[name] & 1)

    def entry_live(self) -> list[str]:
        """Registers that are read before they are written on some path."""
        live = self.blocks[0].live_in if self.blocks else 0
        return [name for name, bit in self.index.items() if live >> bit & 1]
