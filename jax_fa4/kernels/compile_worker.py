"""Child process of :mod:`jax_fa4.kernels.compile`: one job on standard input, kernel.cubin and kernel.ptx out."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

from jax_fa4.kernels.spec import KernelSpec


def main() -> None:
    """Reads ``{"spec", "builder", "folder"}`` and writes the two files into the folder."""
    job = json.load(sys.stdin)
    spec = KernelSpec.from_json(job["spec"])
    folder = Path(job["folder"])

    import cutlass.cute as cute

    host_function, arguments = importlib.import_module(job["builder"]).build(spec)
    options = (cute.KeepPTX(True), cute.KeepCUBIN(True), cute.GPUArch(spec.arch))
    compiled = cute.compile[options](host_function, *arguments)
    (folder / "kernel.cubin").write_bytes(compiled.__cubin__)
    (folder / "kernel.ptx").write_text(compiled.__ptx__.rstrip("\0"))


if __name__ == "__main__":
    main()
