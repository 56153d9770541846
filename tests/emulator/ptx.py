"""PTX front end: text to a list of instructions with resolved names.

Operands are tuples whose first element is the form:

- ``("r", name)`` register; names declared in an inline-asm scope are made unique by a suffix
- ``("i", value)`` integer immediate; ``("f", bits, width)`` float immediate as its bit pattern
- ``("s", symbol)`` variable or label; ``("_",)`` sink
- ``("v", [operands])`` vector; ``("m", [operands])`` memory operand; ``("+", operand, offset)`` address arithmetic
- ``("|", a, b)`` pair of destinations; ``("!", operand)`` negated predicate
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from .errors import UnsupportedError


@dataclass
class Instruction:
    """One PTX instruction. ``line`` is 1-based in the text; ``guard`` is (register, negated) or None."""

    parts: tuple[str, ...]
    operands: list[tuple]
    line: int
    text: str
    guard: tuple[str, bool] | None = None

    @property
    def opcode(self) -> str:
        return ".".join(self.parts)


@dataclass
class Variable:
    """A module- or function-scope variable. ``size`` in bytes (0 for extern dynamic shared memory)."""

    name: str
    space: str
    align: int
    size: int
    data: bytes | None = None


@dataclass
class Kernel:
    """One entry: parameters with byte offsets in the parameter space, registers' types, instructions and labels."""

    name: str
    params: dict[str, tuple[int, int]] = field(default_factory=dict)  # name -> (offset, size)
    param_bytes: int = 0
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)  # label -> index of the instruction that follows
    types: dict[str, str] = field(default_factory=dict)  # register -> "pred" | "b16" | "b32" | "b64" | ...
    ranges: dict[str, str] = field(default_factory=dict)  # "%r" -> type for %r<N>
    variables: dict[str, Variable] = field(default_factory=dict)
    reqntid: tuple[int, int, int] | None = None
    target: str = ""
    tensor_hazards: list[tuple[int, int]] | None = None  # sm100/hazards.py: registers used before tcgen05.wait::ld

    def type_of(self, register: str) -> str:
        known = self.types.get(register)
        if known is None:
            prefix = register.rstrip("0123456789")
            known = self.ranges.get(prefix)
            if known is None:
                raise UnsupportedError(f"register {register} of kernel {self.name} has no declaration")
            self.types[register] = known
        return known


_SIZES = {"b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "s16": 2, "f16": 2, "b32": 4, "u32": 4, "s32": 4, "f32": 4,
          "b64": 8, "u64": 8, "s64": 8, "f64": 8}  # fmt: skip
_INT = re.compile(r"[+-]?(0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)U?$")
_LABEL = re.compile(r"\s*([A-Za-z_$%][\w$]*)\s*:(?!:)")
_WORD = re.compile(r"[A-Za-z_$%][\w$.]*$")


def _strip_comments(text: str) -> str:
    text = re.sub(r"/\*.*?\*/", lambda m: "\n" * m.group(0).count("\n"), text, flags=re.S)
    return re.sub(r"//[^\n]*", "", text)


def _split(text: str, separator: str = ",") -> list[str]:
    """Splits at top-level separators, respecting brackets."""
    if not any(c in text for c in "{[(<"):
        return [p for p in (q.strip() for q in text.split(separator)) if p]
    parts, depth, start = [], 0, 0
    for i, c in enumerate(text):
        if c in "{[(<":
            depth += 1
        elif c in "}])>":
            depth -= 1
        elif c == separator and depth == 0:
            parts.append(text[start:i].strip())
            start = i + 1
    parts.append(text[start:].strip())
    return [p for p in parts if p]


class _Scope:
    def __init__(self, number: int, parent: _Scope | None):
        self.number, self.parent, self.names = number, parent, set()

    def resolve(self, name: str) -> str:
        scope: _Scope | None = self
        while scope is not None and scope.number:
            if name in scope.names:
                return f"{name}__s{scope.number}"
            scope = scope.parent
        return name


class _Body:
    """Parses one function body: a first pass finds what each scope declares, a second one resolves names."""

    def __init__(self, kernel: Kernel, text: str, line: int):
        self.kernel, self.line = kernel, line
        self.cache: dict[tuple[str, int], tuple] = {}
        self.items = list(self._tokens(text))
        self._declare()
        self._resolve()

    def _tokens(self, text: str):
        """Yields (kind, text, line): kind is one of "{", "}", "label", "statement"."""
        pos, end, line = 0, len(text), self.line
        while True:
            while pos < end and text[pos] in " \t\r\n":
                line += text[pos] == "\n"
                pos += 1
            if pos >= end:
                return
            c = text[pos]
            if c in "{}":
                yield c, c, line
                pos += 1
                continue
            label = _LABEL.match(text, pos)
            if label:
                yield "label", label.group(1), line
                line += text.count("\n", pos, label.end())
                pos = label.end()
                continue
            stop = text.find(";", pos)
            if stop < 0:
                raise UnsupportedError(f"PTX line {line}: statement without a semicolon: {text[pos : pos + 60]!r}")
            statement = text[pos:stop]
            if statement.startswith("."):
                first = statement.split(None, 1)[0]
                if first in (".loc", ".pragma") or first.startswith(".file"):
                    newline = text.find("\n", pos)
                    if first == ".loc":
                        pos = newline if newline >= 0 else end
                        continue
            yield "statement", statement.strip(), line
            line += text.count("\n", pos, stop)
            pos = stop + 1

    def _declare(self) -> None:
        self.scopes = [_Scope(0, None)]
        current, self.scope_of_brace = self.scopes[0], []
        for kind, text, _ in self.items:
            if kind == "{":
                current = _Scope(len(self.scopes), current)
                self.scopes.append(current)
                self.scope_of_brace.append(current)
            elif kind == "}":
                assert current.parent is not None
                current = current.parent
            elif kind == "label":
                current.names.add(text)
            elif text.startswith(".reg"):
                self._registers(text, current)

    def _registers(self, text: str, scope: _Scope) -> None:
        _, kind, names = text.split(None, 2)
        kind = kind.lstrip(".")
        for name in _split(names):
            if "<" in name:
                prefix = name.split("<")[0]
                if scope.number:
                    count = int(name.split("<")[1].rstrip(">"))
                    for i in range(count):
                        scope.names.add(f"{prefix}{i}")
                        self.kernel.types[f"{prefix}{i}__s{scope.number}"] = kind
                else:
                    self.kernel.ranges[prefix] = kind
            else:
                scope.names.add(name)
                self.kernel.types[f"{name}__s{scope.number}" if scope.number else name] = kind

    def _resolve(self) -> None:
        scope, braces = self.scopes[0], iter(self.scope_of_brace)
        for kind, text, line in self.items:
            if kind == "{":
                scope = next(braces)
            elif kind == "}":
                assert scope.parent is not None
                scope = scope.parent
            elif kind == "label":
                self.kernel.labels[scope.resolve(text)] = len(self.kernel.instructions)
            elif text.startswith("."):
                if text.split(None, 1)[0] not in (".reg", ".pragma", ".loc", ".file", ".branchtargets"):
                    variable = parse_variable(text)
                    self.kernel.variables[variable.name] = variable
            else:
                self.kernel.instructions.append(self._instruction(text, line, scope))

    def _instruction(self, text: str, line: int, scope: _Scope) -> Instruction:
        guard, rest = None, text
        if rest.startswith("@"):
            name, rest = rest[1:].split(None, 1)
            guard = (scope.resolve(name.lstrip("!")), name.startswith("!"))
        opcode, _, arguments = rest.replace("\n", " ").replace("\t", " ").partition(" ")
        parts = tuple(opcode.split("."))
        try:
            operands = [self._operand(o, scope) for o in _split(arguments)]
        except UnsupportedError as error:
            raise UnsupportedError(f"{opcode}: {error} (PTX line {line}: {text[:120]})") from None
        return Instruction(parts, operands, line, " ".join(text.split()), guard)

    def _operand(self, text: str, scope: _Scope) -> tuple:
        key = (text, scope.number)
        found = self.cache.get(key)
        if found is None:
            found = self.cache[key] = self._parse_operand(text, scope)
        return found

    def _parse_operand(self, text: str, scope: _Scope) -> tuple:
        first = text[0]
        if first == "[":
            return ("m", [self._operand(p, scope) for p in _split(text[1 : text.rindex("]")])])
        if first == "{":
            return ("v", [self._operand(p, scope) for p in _split(text[1 : text.rindex("}")])])
        if first == "!":
            return ("!", self._operand(text[1:].strip(), scope))
        if text == "_":
            return ("_",)
        if "|" in text:
            a, b = text.split("|")
            return ("|", self._operand(a.strip(), scope), self._operand(b.strip(), scope))
        if _INT.match(text):
            digits = text.rstrip("U")
            octal = re.fullmatch(r"[+-]?0\d+", digits)
            return ("i", int(digits, 8 if octal else 0))
        if text[:2] in ("0f", "0F"):
            return ("f", int(text[2:], 16), 32)
        if text[:2] in ("0d", "0D"):
            return ("f", int(text[2:], 16), 64)
        plus = re.fullmatch(r"(.+?)\s*([+-])\s*(-?\s*\w+)", text)
        if plus and not _WORD.match(text):
            offset = int(plus.group(3).replace(" ", "").rstrip("U"), 0) * (-1 if plus.group(2) == "-" else 1)
            return ("+", self._operand(plus.group(1).strip(), scope), offset)
        if _WORD.match(text):
            if text.startswith("%") and "." in text:
                return ("r", text)
            name = scope.resolve(text)
            if name in self.kernel.types or name.startswith("%"):
                return ("r", name)
            return ("s", name)
        raise UnsupportedError(f"operand {text!r}")


def parse_variable(text: str) -> Variable:
    """A variable declaration such as ``.extern .shared .align 1024 .b8 name[]``."""
    space = next((s for s in ("shared", "global", "const", "local", "param") if f".{s}" in text), None)
    align = re.search(r"\.align\s+(\d+)", text)
    match = re.search(r"\.(\w+)\s+([\w$%]+)\s*((?:\[[^\]]*\])*)\s*(?:=\s*(.*))?$", text.strip(), flags=re.S)
    if space is None or match is None or match.group(1) not in _SIZES:
        raise UnsupportedError(f"declaration {text!r}")
    element = _SIZES[match.group(1)]
    count = 1
    for extent in re.findall(r"\[\s*(\d*)\s*\]", match.group(3)):
        count *= int(extent) if extent else 0
    data = None
    if match.group(4):
        values = [int(v, 0) for v in re.findall(r"-?(?:0[xX][0-9a-fA-F]+|\d+)", match.group(4))]
        data = b"".join((v % (1 << (8 * element))).to_bytes(element, "little") for v in values)
        count = max(count, len(values))
        data = data.ljust(count * element, b"\0")
    return Variable(match.group(2), space, int(align.group(1)) if align else element, element * count, data)


def _parameters(kernel: Kernel, text: str) -> None:
    offset = 0
    for declaration in _split(text):
        if not declaration.startswith(".param"):
            raise UnsupportedError(f"parameter {declaration!r}")
        stripped = re.sub(r"\.ptr(\s+\.\w+)?(\s+\.align\s+\d+)?(?=\s+[\w$])", "", declaration)
        variable = parse_variable(stripped)
        offset = -(-offset // variable.align) * variable.align
        kernel.params[variable.name] = (offset, variable.size)
        offset += variable.size
    kernel.param_bytes = offset


def parse(text: str) -> dict[str, Kernel]:
    """Parses a PTX module. Returns its entries by name. Raises :class:`UnsupportedError` on unknown syntax."""
    clean = _strip_comments(text)
    target = re.search(r"\.target\s+([\w]+)", clean)
    heads = list(re.finditer(r"\.entry\s+([\w$]+)\s*(\((.*?)\))?", clean, flags=re.S))
    first = heads[0].start() if heads else len(clean)
    module: dict[str, Variable] = {}
    prologue = clean[: clean.rfind("\n", 0, first) + 1]
    if re.search(r"\.func\b", prologue):
        prologue = prologue[: re.search(r"(\.\w+\s+)*\.func\b", prologue).start()]  # type: ignore[union-attr]
    for statement in prologue.split(";"):
        declaration = re.search(r"((?:\.(?:extern|visible|weak)\s+)*\.(?:shared|global|const)\b.*)", statement, re.S)
        if declaration:
            variable = parse_variable(declaration.group(1))
            module[variable.name] = variable
    kernels = {}
    for head in heads:
        kernel = Kernel(head.group(1), target=target.group(1) if target else "")
        kernel.variables.update(module)
        if head.group(3):
            _parameters(kernel, head.group(3).strip())
        start = clean.index("{", head.end())
        ntid = re.search(r"\.reqntid\s+([\d,\s]+)", clean[head.end() : start])
        if ntid:
            sizes = [int(v) for v in ntid.group(1).split(",")] + [1, 1]
            kernel.reqntid = (sizes[0], sizes[1], sizes[2])
        depth, pos = 1, start + 1
        brace = re.compile(r"[{}]")
        while depth:
            match = brace.search(clean, pos)
            if match is None:
                raise UnsupportedError(f"kernel {kernel.name}: unbalanced braces")
            depth += 1 if match.group(0) == "{" else -1
            pos = match.end()
        _Body(kernel, clean[start + 1 : pos - 1], clean.count("\n", 0, start + 1) + 1)
        kernels[kernel.name] = kernel
    return kernels
