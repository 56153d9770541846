"""Translation of one PTX kernel to one Python generator function.

The function runs a warp: local variables are registers (see kinds.py), a ``pc`` loop dispatches on basic blocks by a
binary tree of comparisons, and ``yield`` hands control to the scheduler wherever the program synchronises or starts
asynchronous work. Divergence: ``M`` holds the active lanes (bool array, the object ``FULL`` when all are active) and a
stack of (block, lanes, reconvergence block) holds what remains to be run.

Opcodes register with :func:`opcode`; an emitter gets the translator and the instruction and appends Python lines.
Unknown opcodes raise :class:`UnsupportedError` with the opcode, line and text.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from . import lanes
from .cfg import Block, Flow, is_special
from .errors import UnsupportedError
from .kinds import choose
from .ptx import Instruction, Kernel

EMITTERS: dict[str, Callable[[Translator, Instruction], None]] = {}
BITS = {"h": 16, "u": 32, "U": 64, "f": 32, "d": 64, "x": 64, "p": 1}
INT_KIND = {8: "h", 16: "h", 32: "u", 64: "U"}
_POISON_INT = {"h": 0x7FFF, "u": 0x7FFFDEAD, "U": 0x7FF8DEAD7FFFDEAD}

# kind of value needed -> {kind held: (expression for scalars, expression for arrays)}
_CONVERT = {
    ("f", "u"): ("float_to_bits({})", "{}.view(u4)"),
    ("u", "f"): ("bits_to_float({})", "{}.view(f4)"),
    ("d", "U"): ("double_to_bits({})", "{}.view(u8)"),
    ("U", "d"): ("bits_to_double({})", "{}.view(f8)"),
    ("U", "x"): ("pair_from_64({})", "pair_from_64({})"),
    ("x", "U"): ("pair_to_64({})", "pair_to_64({})"),
    ("d", "x"): ("pair_from_64(double_to_bits({}))", "pair_from_64({}.view(u8))"),
    ("x", "d"): ("pair_to_64({}).view(f8)", "pair_to_64({}).view(f8)"),
}
_SPECIAL = {
    "%ntid": "w.cta.ntid[{}]", "%ctaid": "w.cta.ctaid[{}]", "%nctaid": "w.cta.nctaid[{}]",
    "%cluster_ctaid": "w.cta.cluster_ctaid[{}]", "%cluster_nctaid": "w.cta.cluster_dims[{}]",
    "%clusterid": "w.cta.clusterid[{}]", "%nclusterid": "w.cta.nclusterid[{}]",
}  # fmt: skip
_SPECIAL_PLAIN = {
    "%cluster_ctarank": "w.cta.rank", "%cluster_nctarank": "w.cta.cluster_size", "%warpid": "w.index",
    "%smid": "w.cta.sm", "%nsmid": "w.machine.sm_count", "%clock": "w.clock()", "%clock64": "w.clock()",
    "%globaltimer": "w.clock()", "%globaltimer_lo": "w.clock()", "%total_smem_size": "w.cta.shared.size",
    "%dynamic_smem_size": "w.cta.dynamic_bytes", "%is_explicit_cluster": "(w.cta.cluster_size > 1)",
    "%nwarpid": "w.cta.warp_count", "%gridid": "0", "%aggr_smem_size": "w.cta.shared.size",
}  # fmt: skip


def opcode(*names: str):
    """Registers an emitter for opcodes given as dotted prefixes; the longest matching prefix wins."""

    def register(function):
        for name in names:
            EMITTERS[name] = function
        return function

    return register


class Value:
    """An operand as Python source: expression, kind, and whether it is one scalar for all lanes."""

    __slots__ = ("expression", "kind", "uniform")

    def __init__(self, expression: str, kind: str, uniform: bool):
        self.expression, self.kind, self.uniform = expression, kind, uniform

    def __str__(self) -> str:
        return self.expression


class Translator:
    """Builds the source of the warp function of ``kernel`` for CTAs whose threads lie along x only or not."""

    def __init__(self, kernel: Kernel, symbols: dict[str, str], one_dimensional: bool, partial: bool = False):
        self.kernel, self.symbols = kernel, symbols
        self.kinds = choose(kernel)
        self.flow = Flow(kernel, one_dimensional, tuple(n for n, kind in self.kinds.items() if kind == "x"))
        if partial:
            for block in self.flow.blocks:
                block.divergent, block.escapes = True, -1
        self.names = {name: f"r{number}" for name, number in self.flow.index.items()}
        self.constants: dict[str, object] = {}
        self.poisoned: set[str] = set(self.flow.entry_live())
        self.out: list[str] = []
        self.indent = 0
        self.block: Block = Block(0, 0)
        self.mask = "M"
        self.line_number = 0
        self.flushed = self._flushed()
        self.accumulators = {
            o[1]
            for ins in kernel.instructions
            if ins.parts[:2] in (("wgmma", "mma_async"), ("tcgen05", "ld"))
            for o in (ins.operands[0][1] if ins.operands[0][0] == "v" else [ins.operands[0]])
            if o[0] == "r"
        }

    def _flushed(self) -> set[str]:
        """Registers that only ``.ftz`` instructions write: never subnormal, so readers need not flush them again."""
        flushing: dict[str, bool] = {}
        for ins in self.kernel.instructions:
            if ins.operands and ins.operands[0][0] == "r":
                name = ins.operands[0][1]
                flushing[name] = flushing.get(name, True) and "ftz" in ins.parts
        unpacked = (i for i in self.kernel.instructions if i.operands and i.operands[0][0] == "v")
        for ins in unpacked:
            for operand in ins.operands[0][1]:
                flushing[operand[1] if operand[0] == "r" else "_"] = False
        return {name for name, always in flushing.items() if always}

    # ---- output ------------------------------------------------------------------------------------------------------
    def line(self, text: str) -> None:
        self.out.append(" " * self.indent + text)

    def at(self, ins: Instruction) -> None:
        """Records the PTX line for reports: emitted before anything that may raise or block."""
        if ins.line != self.line_number:
            self.line(f"w.line = {ins.line}")
            self.line_number = ins.line

    def constant(self, value) -> str:
        name = f"K{len(self.constants)}"
        self.constants[name] = value
        return name

    def fail(self, ins: Instruction, why: str = "not supported") -> UnsupportedError:
        return UnsupportedError(f"{ins.opcode}: {why} (PTX line {ins.line}: {ins.text[:120]})")

    # ---- operands ----------------------------------------------------------------------------------------------------
    def raw(self, operand: tuple, kind_hint: str = "u") -> Value:
        """The operand in the representation in which it is held."""
        form = operand[0]
        if form == "r":
            name = operand[1]
            if is_special(name):
                return self._special(name)
            return Value(self.names[name], self.kinds[name], self.flow.uniform(name))
        if form == "i":
            if kind_hint in ("f", "d", "x", "p"):
                kind_hint = {"f": "u", "p": "u"}.get(kind_hint, "U")
            return Value(str(operand[1] & ((1 << BITS[kind_hint]) - 1)), kind_hint, True)
        if form == "f":
            if operand[2] == 32:
                return Value(self.constant(np.uint32(operand[1]).view(np.float32)), "f", True)
            return Value(self.constant(np.uint64(operand[1]).view(np.float64)), "d", True)
        if form == "s":
            return Value(self.symbol(operand[1]), "U", True)
        if form == "+":
            inner = self.raw(operand[1], kind_hint)
            bits = BITS[inner.kind]
            if inner.uniform:
                return Value(f"({inner} + {operand[2]} & {(1 << bits) - 1})", inner.kind, True)
            return Value(f"({inner} + {operand[2] & ((1 << bits) - 1)})", inner.kind, False)
        if form == "v" and len(operand[1]) == 2:
            parts = [self.raw(o) for o in operand[1]]
            if all(p.kind == "h" for p in parts):
                return Value(f"pack16({parts[0]}, {parts[1]})", "u", all(p.uniform for p in parts))
            if any(p.kind == "f" for p in parts) and kind_hint == "x":
                return Value(
                    f"pack_pair({self.value(operand[1][0], 'f')}, {self.value(operand[1][1], 'f')})", "x", False
                )
            low, high = (self.value(o, "u") for o in operand[1])
            return Value(f"pack32({low}, {high})", "U", low.uniform and high.uniform)
        raise UnsupportedError(f"operand {operand!r} (PTX line {self.line_number})")

    def value(self, operand: tuple, kind: str) -> Value:
        """The operand converted to ``kind`` (same number of bits, except that immediates fit any)."""
        if operand[0] == "f" and kind == "f" and operand[2] == 64:
            return Value(self.constant(np.float32(np.uint64(operand[1]).view(np.float64))), "f", True)
        return self.convert(self.raw(operand, kind), kind)

    def convert(self, v: Value, kind: str) -> Value:
        if v.kind == kind:
            return v
        template = _CONVERT.get((v.kind, kind))
        if template:
            return Value(template[0 if v.uniform else 1].format(v), kind, v.uniform and kind != "x")
        if kind in INT_KIND.values() and v.kind in INT_KIND.values():  # e.g. st.b8 from a 32-bit register
            return Value(f"resize({v}, {BITS[v.kind]}, False, {BITS[kind]})", kind, v.uniform)
        if kind in INT_KIND.values() and v.kind in ("f", "d"):
            return self.convert(self.convert(v, "u" if v.kind == "f" else "U"), kind)
        raise UnsupportedError(f"a {v.kind} value where {kind} is needed: {v} (PTX line {self.line_number})")

    def scalar(self, operand: tuple, kind: str) -> str:
        """An expression for the operand as one scalar; lanes that differ are an error at run time."""
        v = self.value(operand, kind)
        return v.expression if v.uniform else f"w.same({v}, M)"

    def symbol(self, name: str) -> str:
        if name not in self.symbols:
            raise UnsupportedError(f"symbol {name} (PTX line {self.line_number})")
        return self.symbols[name]

    def _special(self, name: str) -> Value:
        if name in _SPECIAL_PLAIN:
            return Value(_SPECIAL_PLAIN[name], "U" if name in ("%clock64", "%globaltimer") else "u", True)
        base, _, axis = name.partition(".")
        if base == "%tid":
            uniform = self.flow.one_dimensional and axis != "x"
            return Value("0" if uniform else f"w.tid[{'xyz'.index(axis)}]", "u", uniform)
        if base in _SPECIAL and axis:
            return Value(_SPECIAL[base].format("xyz".index(axis)), "u", True)
        if name == "%laneid":
            return Value("LANE", "u", False)
        if name.startswith("%lanemask_"):
            return Value(f"w.lanemask[{name[10:]!r}]", "u", False)
        raise UnsupportedError(f"special register {name}")

    def predicate(self, operand: tuple) -> Value:
        if operand[0] == "!":
            inner = self.predicate(operand[1])
            return Value(f"(not {inner})" if inner.uniform else f"~{inner}", "p", inner.uniform)
        if operand[0] == "i":
            return Value(str(bool(operand[1])), "p", True)
        return self.value(operand, "p")

    # ---- results -----------------------------------------------------------------------------------------------------
    def set(self, operand: tuple, expression: str, kind: str, uniform: bool, alias: bool = False) -> None:
        """Assigns to a destination register, converting, broadcasting and blending as it needs.

        ``alias``: the expression may be another register's array (copied if asynchronous work may write into it).
        """
        if operand[0] == "_":
            self.line(expression)
            return
        name = operand[1]
        target, held = self.names[name], self.kinds[name]
        v = self.convert(Value(expression, kind, uniform), held)
        expression, uniform = v.expression, v.uniform
        if self.flow.uniform(name):
            if not uniform:
                cast = {"p": "bool", "f": "", "d": ""}.get(held, "int")
                expression = f"{cast}(({expression})[w.first(M)])"
        elif uniform:
            expression = f"spread_{held}({expression})"
        elif alias:
            expression = f"{expression}.copy()"
        guarded = self.mask != "M"
        if guarded or (not self.flow.uniform(name) and self.flow.escaping(self.block, name)):
            if self.flow.uniform(name):
                raise UnsupportedError(f"register {name} is uniform but partly written (PTX line {self.line_number})")
            self.poisoned.add(name)
            expression = f"where({self.mask}, {expression}, {target})"
        self.line(f"{target} = {expression}")

    # ---- the whole function ------------------------------------------------------------------------------------------
    def instruction(self, ins: Instruction) -> None:
        parts = ins.parts
        for length in range(min(len(parts), 5), 0, -1):
            emitter = EMITTERS.get(".".join(parts[:length]))
            if emitter is not None:
                break
        else:
            raise self.fail(ins, "unknown opcode")
        if ins.guard and parts[0] not in ("bra", "ret", "exit", "trap"):
            guard = self.predicate(("!", ("r", ins.guard[0])) if ins.guard[1] else ("r", ins.guard[0]))
            self.line_number = 0
            if guard.uniform:
                self.line(f"if {guard}:")
                self.indent += 1
                emitter(self, ins)
                self.indent -= 1
            else:
                self.line(f"G = {guard} & M")
                self.line("if count_nonzero(G):")
                self.indent += 1
                self.mask = "G"
                emitter(self, ins)
                self.mask = "M"
                self.indent -= 1
            self.line_number = 0
        else:
            emitter(self, ins)

    def _go(self, target: int) -> None:
        self.line(f"pc = {target}")
        if target in self.meets:
            self.line("while pc == rp: pc, M, rp = st.pop()")

    def _end(self, number: int, block: Block) -> None:
        """Control flow at the end of a block."""
        last = self.kernel.instructions[block.stop - 1]
        kind = last.parts[0]
        if kind == "trap" and not last.guard:
            self.at(last)
            self.line("w.trap()")
            return
        if kind not in ("bra", "ret", "exit", "trap"):
            self._go(number + 1)
            return
        if kind == "trap":
            taken = -1
        else:
            taken = block.successors[0]
        if not last.guard:
            self._go(taken)
            return
        guard = self.predicate(("!", ("r", last.guard[0])) if last.guard[1] else ("r", last.guard[0]))
        if kind == "trap":
            self.at(last)
            self.line(f"if {guard if guard.uniform else f'count_nonzero({guard} & M)'}: w.trap()")
            self._go(number + 1)
            return
        if guard.uniform:
            self.line(f"if {guard}:")
            self.indent += 1
            self._go(taken)
            self.indent -= 1
            self.line("else:")
            self.indent += 1
            self._go(number + 1)
            self.indent -= 1
            return
        meet = self.flow.reconvergence[number]
        self.line(f"t = {guard} & M")
        self.line("c = count_nonzero(t)")
        self.line(f"if not c: pc = {number + 1}")
        self.line(f"elif c == count_nonzero(M): pc = {taken}")
        self.line("else:")
        self.line(f" st.append(({meet}, M, rp)); st.append(({number + 1}, M & ~t, {meet}))")
        self.line(f" M = t; rp = {meet}; pc = {taken}")
        self.line("while pc == rp: pc, M, rp = st.pop()")

    def _tree(self, low: int, high: int) -> None:
        if high - low == 1:
            if low == self.flow.exit_block:
                self.line("return")
                return
            block = self.flow.blocks[low]
            self.block, self.line_number = block, 0
            self.line(f"bc[{low}] += 1")
            for i in range(block.start, block.stop):
                ins = self.kernel.instructions[i]
                if ins.parts[0] not in ("bra", "ret", "exit", "trap"):
                    self.instruction(ins)
            self._end(low, block)
            return
        middle = (low + high) // 2
        self.line(f"if pc < {middle}:")
        self.indent += 1
        self._tree(low, middle)
        self.indent -= 1
        self.line("else:")
        self.indent += 1
        self._tree(middle, high)
        self.indent -= 1

    def source(self) -> str:
        """The Python source; :attr:`constants` holds the objects that it names K0, K1, ..."""
        self.meets = set(self.flow.reconvergence.values()) | {self.flow.exit_block}
        self.indent = 2
        self._tree(0, self.flow.exit_block + 1)
        body, self.out, self.indent = self.out, [], 1
        for name in sorted(self.poisoned):
            kind, target = self.kinds[name], self.names[name]
            if self.flow.uniform(name):
                value = {"p": "False", "f": "f4('nan')", "d": "float('nan')", "x": "POISON_x"}.get(kind)
                self.line(f"{target} = {value or _POISON_INT[kind]}")
            else:
                self.line(f"{target} = POISON_{kind}")
        return "\n".join(
            [
                "def warp(w):",
                " if w is None: yield",  # a generator even if the program never synchronises
                " M = w.initial_mask; rp = -1; st = []; pc = 0; bc = w.block_counts",
                *self.out,
                " while True:",
                *body,
                "",
            ]
        )


def _poison() -> dict[str, object]:
    table: dict[str, object] = {f"POISON_{k}": np.full(32, v, t) for (k, v), t in zip(
        _POISON_INT.items(), (np.uint16, np.uint32, np.uint64), strict=True)}  # fmt: skip
    table["POISON_f"] = np.full(32, np.nan, np.float32)
    table["POISON_d"] = np.full(32, np.nan)
    table["POISON_x"] = np.full((2, 32), np.nan, np.float32)
    table["POISON_p"] = lanes.NONE
    return table


def _spreaders() -> dict[str, object]:
    types = {"h": np.uint16, "u": np.uint32, "U": np.uint64, "f": np.float32, "d": np.float64}
    table = {f"spread_{k}": (lambda x, t=t: np.full(32, x, t)) for k, t in types.items()}
    table["spread_p"] = lambda x: lanes.FULL if x else lanes.NONE
    table["spread_x"] = lanes.pair_from_64
    return table


ENVIRONMENT: dict[str, object] = {
    **{k: v for k, v in vars(lanes).items() if not k.startswith("__")},
    **_poison(),
    **_spreaders(),
    "where": np.where,
    "count_nonzero": np.count_nonzero,
    "np": np,
}


def compile_kernel(kernel: Kernel, symbols: dict[str, str], one_dimensional: bool, partial: bool = False):
    """Translates and compiles. Returns (generator function of a warp, source text, flow)."""
    from . import emit_async, emit_cvt, emit_float, emit_int, emit_memory, emit_sync, tcgen05_emit  # noqa: F401

    translator = Translator(kernel, symbols, one_dimensional, partial)
    source = translator.source()
    environment = dict(ENVIRONMENT)
    environment.update(translator.constants)
    exec(compile(source, f"<ptx {kernel.name[:60]}>", "exec"), environment)
    return environment["warp"], source, translator.flow
