"""Planted faults that change nothing: why a statement may be missing from a kernel that stays right without it.

Each rule is a property of the control flow, checked on the kernel at hand, so that a fault is excused only as long as
the reason holds. docs/emulator.md argues each rule in full.
"""

from __future__ import annotations

from collections.abc import Iterator

from .cfg import Flow
from .fences import accesses_after_fence
from .mutants import Fault
from .ptx import Instruction, parse

_WAITS = ("wait skipped", "phase flipped")
_ORDERING = ("warp barrier removed", "tcgen05 fence before removed", "tcgen05 fence after removed")


def _waits(ins: Instruction) -> bool:
    return ins.parts[:2] in (("mbarrier", "try_wait"), ("mbarrier", "test_wait"))


def _reaches_others(ins: Instruction) -> bool:
    """Whether other threads or units can notice that the instruction has run, or it them."""
    base = ins.parts[0]
    if _waits(ins):
        return False
    if base in ("ld", "ldu"):
        return "param" not in ins.parts
    return base in (
        "st", "red", "atom", "cp", "mbarrier", "bar", "barrier", "wgmma", "tcgen05", "fence", "stmatrix", "ldmatrix",
        "clusterlaunchcontrol", "mapa",
    )  # fmt: skip


class Statements:
    """The control flow of a module's only kernel, from PTX lines."""

    def __init__(self, text: str):
        self.kernel = next(iter(parse(text).values()))
        self.flow = Flow(self.kernel, True)
        self.at = {ins.line: i for i, ins in enumerate(self.kernel.instructions)}

    def after(self, line: int, stop) -> Iterator[Instruction | None]:
        """On each path that begins after ``line``: the first instruction for which ``stop`` holds, or None where the
        path ends the kernel before. A path that begins at a wait goes on where the wait has succeeded."""
        code, flow = self.kernel.instructions, self.flow
        blocks = {i: b for b in flow.blocks for i in range(b.start, b.stop)}
        first = self.at[line] + 1
        if _waits(code[first - 1]) and code[first].parts[0] == "bra":
            first = self.kernel.labels[code[first].operands[0][1]]
        todo, seen = [first], set()
        while todo:
            index = todo.pop()
            if index in seen:
                continue
            seen.add(index)
            if index == len(code):
                yield None
            elif stop(code[index]):
                yield code[index]
            elif index + 1 < blocks[index].stop:
                todo.append(index + 1)
            else:
                ends = self._arriving_lane(blocks[index].successors)
                todo.extend(len(code) if b == flow.exit_block else flow.blocks[b].start for b in ends)

    def _arriving_lane(self, successors: list[int]) -> list[int]:
        """Of a branch around an arrival only the way of the lane that arrives: the warp as a whole does."""
        if len(successors) == 2 and successors[1] < len(self.flow.blocks):
            target, block = successors[0], self.flow.blocks[successors[1]]
            inside = self.kernel.instructions[block.start : block.stop]
            if block.successors == [target] and any(ins.parts[:2] == ("mbarrier", "arrive") for ins in inside):
                return successors[1:]
        return successors


def _nothing_follows(statements: Statements, line: int) -> bool:
    return all(ins is None for ins in statements.after(line, _reaches_others))


def _passes_on_in_turn(statements: Statements, line: int) -> bool:
    """From the wait on, the warp touches no memory until it arrives on an mbarrier, and it does not come back to the
    wait without a CTA barrier."""
    own = statements.kernel.instructions[statements.at[line]]
    stops = [*statements.after(line, lambda i: _waits(i) or (_reaches_others(i) and i.parts[0] != "bar"))]
    returns = [*statements.after(line, lambda i: i is own or i.opcode == "bar.sync")]
    return all(ins is not None and ins.parts[:2] == ("mbarrier", "arrive") for ins in stops) and own not in returns


def _reads_awaited(statements: Statements, line: int) -> bool:
    """After every commit of bulk stores, a wait for the reads of all groups comes before ``line``."""
    own = statements.kernel.instructions[statements.at[line]]

    def awaits(ins: Instruction) -> bool:
        return ins is own or (ins.opcode == "cp.async.bulk.wait_group.read" and ins.operands[0][1] == 0)

    commits = [i.line for i in statements.kernel.instructions if i.opcode == "cp.async.bulk.commit_group"]
    return all(own not in statements.after(commit, awaits) for commit in commits)


def _orders_no_access(statements: Statements, line: int) -> bool:
    """After a tcgen05 fence, another one or the end comes before any access to tensor memory."""

    def accesses(ins: Instruction) -> bool:
        return ins.parts[0] == "tcgen05" and ins.parts[1] in ("ld", "st", "mma", "cp", "fence::after_thread_sync")

    return all(ins is None or ins.parts[1] == "fence::after_thread_sync" for ins in statements.after(line, accesses))


def _joins_the_next_group(statements: Statements, line: int) -> bool:
    """Another commit follows on every path before any wait, and the next wait is for all groups."""

    def is_commit(ins: Instruction) -> bool:
        return ins.parts[:2] in (("wgmma", "commit_group"), ("wgmma", "wait_group"))

    def is_wait(ins: Instruction) -> bool:
        return ins.parts[:2] == ("wgmma", "wait_group")

    commits = [*statements.after(line, is_commit)]
    waits = [*statements.after(line, is_wait)]
    return all(ins is not None and ins.parts[1] == "commit_group" for ins in commits) and all(
        ins is not None and ins.operands[0][1] == 0 for ins in waits
    )


def _implied_by_the_queries(statements: Statements, line: int) -> bool:
    """The load warp of the Blackwell forward, between the loads of a tile's two query parts (the 5-D tensor maps): its
    waits for the first key block's slot and for the second query part."""
    code = statements.kernel.instructions
    own = statements.at[line]

    def ranks(instructions) -> list[str]:
        loads = (i for i in instructions if i.opcode.startswith("cp.async.bulk.tensor") and "tile" in i.parts)
        return [i.parts[4] for i in loads if "bulk_group" not in i.parts]

    before, behind = ranks(code[:own]), ranks(code[own:])
    return "5d" in before and "5d" in behind and (before[-1], behind[0]) in (("5d", "4d"), ("4d", "5d"))


def reason(fault: Fault, statements: Statements, effects: set[int]) -> str | None:
    """Why the fault cannot be noticed, or None. ``statements`` are those of the kernel, ``effects`` the lines
    of fences and warp barriers that ordered something when it ran."""
    kind, line, mutated = fault
    if kind in _WAITS and _nothing_follows(statements, line):
        return "the warp only exits after this wait; the CTA lives until the warps that use the barrier have ended"
    if kind == "wait skipped" and _passes_on_in_turn(statements, line):
        return "an idle warpgroup hands a buffer on unread; the turn barrier keeps its arrival in the right phase"
    if kind == "wait skipped" and _implied_by_the_queries(statements, line):
        return "the wait for the first query part covers it: the tensor core releases the queries last"
    if kind in _ORDERING and line not in effects:
        return "the statement ordered nothing: no access that it covers came between it and the one before"
    if kind == "tcgen05 fence after removed" and _orders_no_access(statements, line):
        return "no access to tensor memory follows, at most its release, which is no asynchronous operation"
    if kind == "bulk wait removed" and _nothing_follows(statements, line) and _reads_awaited(statements, line):
        return "the reads of all stores have been waited for; their writes are complete when the kernel ends"
    if kind == "wgmma commit removed" and _joins_the_next_group(statements, line):
        return "the products join the next group, and the next wait is for all groups"
    if kind == "wgmma fence removed":
        kernel = next(iter(parse(mutated).values()))
        if not accesses_after_fence(Flow(kernel, True)):
            return "an earlier fence already follows every access to the registers of the products"
    return None
