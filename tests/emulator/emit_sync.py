"""Emitters: mbarriers, named and cluster barriers, fences, register reallocation, dependent launch, sleeping."""

from __future__ import annotations

from .emit_memory import address
from .ptx import Instruction
from .translate import Translator, opcode


def wait(t: Translator, begin: str, again: str) -> None:
    """Source that blocks: yields whatever ``begin`` and then ``again`` return until that is None."""
    t.line(f"t = {begin}")
    t.line("while t is not None:")
    t.line(f" yield t; t = {again}")


def scalar_address(t: Translator, operand: tuple) -> str:
    source, uniform = address(t, operand)
    return source if uniform else f"w.same({source}, {t.mask})"


def _lane_address(t: Translator, operand: tuple) -> str:
    return address(t, operand)[0]


@opcode("mbarrier")
def mbarrier(t: Translator, ins: Instruction) -> None:
    action, operands = ins.parts[1], ins.operands
    t.at(ins)
    if action == "init":
        t.line("yield")
        t.line(f"w.mbarrier_init({scalar_address(t, operands[0])}, {t.scalar(operands[1], 'u')})")
    elif action == "inval":
        t.line(f"w.mbarrier_inval({scalar_address(t, operands[0])})")
    elif action in ("arrive", "arrive_drop"):
        if action == "arrive_drop":
            raise t.fail(ins)
        target = operands[0] if operands[0][0] != "m" else None
        rest = operands[1:] if target is not None else operands
        expect = "expect_tx" in ins.parts
        if "noComplete" in ins.parts:
            raise t.fail(ins)
        value = t.scalar(rest[1], "u") if len(rest) > 1 else ("0" if expect else "1")
        count, tx = ("1", value) if expect else (value, "None")
        t.line("yield")
        t.line(f"t = w.mbarrier_arrive({_lane_address(t, rest[0])}, {count}, {t.mask}, {tx}, {'relaxed' in ins.parts})")
        if target is not None and target[0] != "_":
            t.set(target, "t", "U", True)
    elif action in ("expect_tx", "complete_tx"):
        name = "mbarrier_expect" if action == "expect_tx" else "mbarrier_complete"
        t.line("yield")
        t.line(f"w.{name}({scalar_address(t, operands[0])}, {t.scalar(operands[1], 'u')}, {t.mask})")
    elif action in ("test_wait", "try_wait"):
        t.line("yield")
        place, parity = scalar_address(t, operands[1]), t.scalar(operands[2], "u" if "parity" in ins.parts else "U")
        wait(t, f"w.try_wait_begin({place}, {parity} & 1, {action == 'try_wait'})", "w.try_wait_again()")
        if operands[0][0] == "|":
            raise t.fail(ins)
        t.set(operands[0], "w.passed", "p", True)
    elif action == "pending_count":
        raise t.fail(ins)
    else:
        raise t.fail(ins)


@opcode("bar", "barrier")
def barrier(t: Translator, ins: Instruction) -> None:
    t.at(ins)
    if "cluster" in ins.parts:
        t.line("yield")
        if "arrive" in ins.parts:
            t.line(f"w.cluster_arrive({'relaxed' in ins.parts}, {t.mask})")
        else:
            wait(t, "w.cluster_wait_begin()", "w.cluster_wait_again()")
        return
    if "warp" in ins.parts:
        t.line("w.sync_lanes()")
        return
    t.line("yield")
    operands = ins.operands
    reduction = "red" in ins.parts
    destination = operands[0] if reduction else None
    rest = operands[1:] if reduction else operands
    predicate = None
    if reduction:
        predicate = t.predicate(rest[-1])
        rest = rest[:-1]
    number = t.scalar(rest[0], "u")
    threads = t.scalar(rest[1], "u") if len(rest) > 1 else "None"
    sync = "arrive" not in ins.parts
    extra = f", lanes({predicate}, bool)" if predicate is not None else ""
    begin = f"w.barrier_begin({number}, {threads}, {t.mask}, {sync}{extra})"
    if sync:
        wait(t, begin, "w.barrier_again()")
    else:
        t.line(begin)
    if destination is not None:
        operation = next(p for p in ins.parts if p in ("popc", "and", "or"))
        t.set(destination, f"w.barrier_result({operation!r})", "u" if operation == "popc" else "p", True)


@opcode("fence", "membar")
def fence(t: Translator, ins: Instruction) -> None:
    t.at(ins)
    t.line("yield")
    if "proxy" in ins.parts:
        kind = next((p for p in ins.parts if p.startswith(("async", "alias", "tensormap"))), "")
        target = next((p for p in ins.parts[3:] if p), "")
        if kind.startswith("async"):
            shared = not target.startswith("global") and not kind.endswith("global")
            everything = not target.startswith("shared") and "shared" not in kind
            t.line(f"w.proxy_fence({shared}, {everything}, {t.mask})")
        return
    if "mbarrier_init" in ins.parts:
        t.line("w.announce_barriers()")
    t.line("w.fence()")


@opcode("setmaxnreg", "nanosleep", "griddepcontrol", "pmevent")
def hints(t: Translator, ins: Instruction) -> None:
    name = ins.parts[0]
    if name == "setmaxnreg":
        t.at(ins)
        t.line(f"w.set_registers({ins.operands[0][1]}, {ins.parts[1] == 'inc'})")
    else:
        t.line("yield")
