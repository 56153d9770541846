"""Artefact: one compiled kernel (cubin, PTX, metadata) and its file format.

The file is a zip archive with the members ``meta.json``, ``kernel.cubin`` and ``kernel.ptx``. Reading checks the
archive's checksums, the cubin's SHA-256, and that the machine code is for the architecture that the spec names.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import struct
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

from jax_fa4.kernels.spec import KernelSpec

FORMAT = 1
"""Version of the file format; part of every artefact's key."""


class ArtefactError(RuntimeError):
    """A file is no usable artefact, or not the one that was asked for; the message names file and reason."""


@dataclass(frozen=True)
class Parameter:
    """One entry parameter as the PTX declares it, in bytes."""

    size: int
    align: int


@dataclass(frozen=True)
class Artefact:
    """One compiled kernel. ``sha256`` is that of ``cubin``; ``threads`` is the block size (``.reqntid``)."""

    spec: KernelSpec
    entry: str
    cubin: bytes
    ptx: str
    parameters: tuple[Parameter, ...]
    threads: tuple[int, int, int]
    source_hash: str
    dsl_version: str

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.cubin).hexdigest()

    @classmethod
    def from_compiler(cls, spec: KernelSpec, cubin: bytes, ptx: str, *, source_hash: str, dsl_version: str) -> Artefact:
        """Artefact from the compiler's outputs; raises :class:`ArtefactError` if they hold other than one kernel."""
        entry, parameters, threads = parse_entry(ptx)
        check_architecture(cubin, spec.arch, "the compiler's output")
        return cls(spec, entry, cubin, ptx, parameters, threads, source_hash, dsl_version)

    def to_bytes(self) -> bytes:
        meta = {
            "format": FORMAT,
            "entry": self.entry,
            "spec": self.spec.to_json(),
            "cubin_sha256": self.sha256,
            "parameters": [[p.size, p.align] for p in self.parameters],
            "threads": list(self.threads),
            "source_hash": self.source_hash,
            "dsl_version": self.dsl_version,
        }
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, data in (
                ("meta.json", json.dumps(meta, indent=1, sort_keys=True).encode()),
                ("kernel.cubin", self.cubin),
                ("kernel.ptx", self.ptx.encode()),
            ):
                # A fixed time stamp makes equal artefacts equal files.
                archive.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), data, zipfile.ZIP_DEFLATED)
        return buffer.getvalue()

    @classmethod
    def read(cls, path: Path, expected: KernelSpec | None = None) -> Artefact:
        """Artefact from a file; raises :class:`ArtefactError` if it is damaged or is not for ``expected``."""
        try:
            with zipfile.ZipFile(path) as archive:
                meta = json.loads(archive.read("meta.json"))
                cubin = archive.read("kernel.cubin")
                ptx = archive.read("kernel.ptx").decode()
            if meta["format"] != FORMAT:
                raise ArtefactError(f"{path}: artefact format {meta['format']}, this version reads {FORMAT}")
            artefact = cls(
                KernelSpec.from_json(meta["spec"]),
                meta["entry"],
                cubin,
                ptx,
                tuple(Parameter(*p) for p in meta["parameters"]),
                tuple(meta["threads"]),
                meta["source_hash"],
                meta["dsl_version"],
            )
        except (zipfile.BadZipFile, zlib.error, KeyError, TypeError, ValueError, EOFError, OSError) as error:
            raise ArtefactError(f"{path}: damaged artefact ({type(error).__name__}: {error})") from error
        if artefact.sha256 != meta["cubin_sha256"]:
            raise ArtefactError(f"{path}: damaged artefact (the cubin's SHA-256 is not the recorded one)")
        if expected is not None and artefact.spec != expected:
            raise ArtefactError(f"{path}: holds kernel {artefact.spec.name}, wanted {expected.name}")
        check_architecture(cubin, artefact.spec.arch, str(path))
        return artefact


_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*\((.*?)\)\s*(.*?)\{", re.DOTALL)
_PARAM = re.compile(
    r"\.param\s+(?:\.align\s+(\d+)\s+)?\.([bufs])(\d+)\s+(?:\.ptr\s+(?:\.(?!align)\w+\s+)?(?:\.align\s+\d+\s+)?)?"
    r"[\w$]+(?:\[(\d+)\])?"
)


def parse_entry(ptx: str) -> tuple[str, tuple[Parameter, ...], tuple[int, int, int]]:
    """Entry name, parameters and block size of a PTX module that holds exactly one entry."""
    entries = _ENTRY.findall(ptx)
    if len(entries) != 1:
        raise ArtefactError(f"the PTX holds {len(entries)} entries {[e[0] for e in entries]}, expected one")
    name, declarations, directives = entries[0]
    parameters = []
    for align, _, bits, count in _PARAM.findall(declarations):
        width = int(bits) // 8
        parameters.append(Parameter(size=width * int(count or 1), align=int(align or width)))
    block = re.search(r"\.reqntid\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?", directives)
    if block is None:
        raise ArtefactError(f"entry {name} states no .reqntid")
    x, y, z = (int(value or 1) for value in block.groups())
    return name, tuple(parameters), (x, y, z)


def check_architecture(cubin: bytes, arch: str, where: str) -> None:
    """Raises :class:`ArtefactError` unless ``cubin`` is an ELF file of machine code for ``arch``."""
    if len(cubin) < 64 or cubin[:4] != b"\x7fELF":
        raise ArtefactError(f"{where}: not a cubin (no ELF header)")
    (flags,) = struct.unpack_from("<I", cubin, 48)
    # ELF ABI 8 and later keep the SM number in bits 8-15, older ones in bits 0-7.
    found = (flags >> 8) & 0xFF if cubin[8] >= 8 else flags & 0xFF
    wanted = int(re.sub(r"\D", "", arch))
    if found != wanted:
        raise ArtefactError(f"{where}: machine code for sm_{found}, wanted {arch}")
