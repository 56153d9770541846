"""Machine code of a cubin, read with nvdisasm: instructions, loops, and what a loop's body is made of."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

_LABEL = re.compile(r"^(\.L_x_\d+):")
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(.*?)\s*;")
_BRANCH = re.compile(r"^BRA\b.*\((\.L_x_\d+)\)")
_REGISTER = re.compile(r"\bR(\d+)\b")


def nvdisasm() -> Path | None:
    """The disassembler: on PATH, or from NVIDIA's wheels; None where there is none."""
    found = shutil.which("nvdisasm")
    if found:
        return Path(found)
    package = importlib.util.find_spec("nvidia")
    for folder in package.submodule_search_locations or () if package else ():
        for path in sorted(Path(folder).glob("*/bin/nvdisasm")):
            return path
    return None


@dataclass
class Machine:
    """Instructions (without predicates) in order, and backward branches as (first, last) indices, smallest first."""

    instructions: list[str]
    loops: list[tuple[int, int]]

    @classmethod
    def of(cls, cubin: bytes) -> Machine:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(cubin)
            file.flush()
            text = subprocess.run([str(nvdisasm()), "-c", file.name], capture_output=True, text=True, check=True).stdout
        instructions, labels = [], {}
        for line in text.splitlines():
            if label := _LABEL.match(line):
                labels[label[1]] = len(instructions)
            elif instruction := _INSTRUCTION.match(line):
                instructions.append(instruction[1])
        loops = []
        for last, instruction in enumerate(instructions):
            branch = _BRANCH.match(instruction)
            if branch and labels.get(branch[1], last + 1) <= last:
                loops.append((labels[branch[1]], last))
        return cls(instructions, sorted(loops, key=lambda loop: loop[1] - loop[0]))

    def count(self, first: int = 0, last: int | None = None) -> Counter[str]:
        """Opcodes (up to the first dot) of a range of instructions, both ends included."""
        chosen = self.instructions[first : None if last is None else last + 1]
        return Counter(instruction.split()[0].split(".")[0] for instruction in chosen)

    def innermost(self, opcode: str, at_least: int) -> tuple[Counter[str], int]:
        """Opcode counts and length of the smallest loop with ``at_least`` instructions ``opcode``."""
        for first, last in self.loops:
            counts = self.count(first, last)
            if counts[opcode] >= at_least:
                return counts, last - first + 1
        raise ValueError(f"no loop has {at_least} {opcode}")

    def register_regions(self) -> list[tuple[int, int]]:
        """(registers granted, highest register used + 1) of the code from each setmaxnreg to the next."""
        marks = [i for i, text in enumerate(self.instructions) if text.startswith("USETMAXREG")]
        regions = []
        for start, end in zip(marks, [*marks[1:], len(self.instructions)], strict=True):
            granted = int(self.instructions[start].split()[-1], 16)
            used = [int(r) for text in self.instructions[start:end] for r in _REGISTER.findall(text)]
            regions.append((granted, max(used, default=-1) + 1))
        return regions
