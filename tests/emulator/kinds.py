"""How each register is held: the representation follows what most instructions do with it.

Kinds: ``p`` predicate, ``h`` 16 bits, ``u`` 32 bits, ``f`` float32, ``U`` 64 bits, ``d`` float64, ``x`` packed pair of
float32 as an array of shape (2, 32). Varying registers are NumPy arrays of 32 lanes (uint16, uint32, float32, uint64,
float64, bool); uniform ones are Python ints (h, u, U), ``numpy.float32``, floats or bools.
"""

from __future__ import annotations

from .cfg import is_special, registers
from .ptx import Kernel

_NEUTRAL = {"mov", "ld", "st", "shfl", "selp", "ldu", "atom", "red"}
_DECLARED = {"pred": "p", "b16": "h", "u16": "h", "s16": "h", "f16": "h", "b8": "h", "u8": "h", "s8": "h"}


def choose(kernel: Kernel) -> dict[str, str]:
    """Kind of every register that occurs in the kernel."""
    votes: dict[str, list[int]] = {}
    edges: list[tuple[str, str]] = []

    def vote(operands: list[tuple], floating: bool) -> None:
        names: list[str] = []
        for operand in operands:
            if operand[0] == "r":
                names.append(operand[1])
            elif operand[0] != "m":
                registers(operand, names)
        for name in names:
            count = votes.get(name)
            if count is None:
                count = votes[name] = [0, 0]
            count[floating] += 1

    for ins in kernel.instructions:
        parts, base, operands = ins.parts, ins.parts[0], ins.operands
        last = parts[-1]
        if base == "cvt":
            vote(operands[:1], parts[-2] in ("f32", "f64", "f32x2"))
            vote(operands[1:], last in ("f32", "f64", "f32x2"))
        elif base == "wgmma":
            if parts[1] == "mma_async":
                vote(operands[:1], "f32" in parts)
                vote(operands[1:], False)
        elif base == "mma":
            vote([operands[0], operands[3]], "f32" in parts)
            vote(operands[1:3], False)
        elif base in ("tcgen05", "cp", "mbarrier"):
            for operand in operands:
                names: list[str] = []
                registers(operand, names)
                for name in names:
                    votes.setdefault(name, [0, 0])
        elif last in ("f16", "bf16") and parts[-2] == "f32":  # 16-bit operands, but for the last
            vote([operands[0], operands[-1]], True)
            vote(operands[1:-1], False)
        elif last in ("f32", "f32x2", "f64") or (base in ("red", "atom") and "f32" in parts):
            vote(operands, True)
        elif base in ("mov", "selp"):
            for operand in operands:
                names = []
                registers(operand, names)
                for name in names:
                    votes.setdefault(name, [0, 0])
            if operands[0][0] == "r":
                edges.extend((operands[0][1], o[1]) for o in operands[1:3] if o[0] == "r")
        elif base in _NEUTRAL:
            for operand in operands:
                names = []
                registers(operand, names)
                for name in names:
                    votes.setdefault(name, [0, 0])
        else:
            vote(operands, False)
        for operand in operands:
            if operand[0] == "m":
                vote_address: list[str] = []
                registers(operand, vote_address)
                for name in vote_address:
                    votes.setdefault(name, [0, 0])[0] += 5
    for _ in range(3):
        for a, b in edges:
            va, vb = votes.get(a, [0, 0]), votes.get(b, [0, 0])
            if not any(va) and any(vb):
                votes[a] = [int(vb[0] >= vb[1]), int(vb[1] > vb[0])]
            elif not any(vb) and any(va):
                votes[b] = [int(va[0] >= va[1]), int(va[1] > va[0])]
    kinds = {}
    for name, (integer, floating) in votes.items():
        if is_special(name):
            continue
        declared = kernel.type_of(name)
        if declared in _DECLARED:
            kinds[name] = _DECLARED[declared]
        elif declared in ("b32", "u32", "s32", "f32"):
            kinds[name] = "f" if declared == "f32" or floating > integer else "u"
        elif declared == "f64":
            kinds[name] = "d"
        elif declared in ("b64", "u64", "s64"):
            kinds[name] = "U"
        elif declared == "b128":
            kinds[name] = "q"
        else:
            raise ValueError(f"register {name} has type {declared}")
    for ins in kernel.instructions:  # packed pairs and doubles live in .b64 registers
        kind = {"f32x2": "x", "f64": "d"}.get(ins.parts[-1])
        if kind and ins.parts[0] not in ("cvt", "mov", "ld", "st", "red", "atom", "setp"):
            for operand in ins.operands:
                if operand[0] == "r" and kinds.get(operand[1]) == "U":
                    kinds[operand[1]] = kind
    return kinds
