"""Artefact files and their look-up, with a stand-in for the compiler where the test is about the store."""

import fnmatch
import os
import re
import struct
import threading
import tomllib
from pathlib import Path

import pytest

from jax_fa4.kernels import compile as compiler
from jax_fa4.kernels import store
from jax_fa4.kernels.artefact import Artefact, ArtefactError
from jax_fa4.kernels.spec import KernelSpec, Tile, UnsupportedSpecError, padded_head_dims, standard_specs

SPEC = KernelSpec.create(arch="sm_90a", kind="forward", dtype="bfloat16", head_dim=128)
PTX = """.version 8.8
.target sm_90a
.visible .entry kernel_x(
 .param .align 64 .b8 kernel_x_param_0[128],
 .param .align 8 .b8 kernel_x_param_1[16],
 .param .f32 kernel_x_param_2,
 .param .u64 kernel_x_param_3
)
.reqntid 384, 1, 1
.minnctapersm 1
{
 ret;
}
"""


def cubin(sm: int = 90, abi: int = 7, body: bytes = b"code") -> bytes:
    """An ELF header as a cubin of that architecture has it, and some bytes."""
    header = bytearray(64)
    header[:4], header[8] = b"\x7fELF", abi
    struct.pack_into("<I", header, 48, sm << 8 | 2 if abi >= 8 else sm)
    return bytes(header) + body


def artefact(spec: KernelSpec = SPEC, sm: int = 90, abi: int = 7) -> Artefact:
    return Artefact.from_compiler(spec, cubin(sm, abi), PTX, source_hash="s", dsl_version="1.0")


@pytest.fixture
def fake_compiler(monkeypatch):
    """Replaces the compiler; the list it returns counts its calls."""
    calls: list[KernelSpec] = []

    def compile_spec(spec):
        calls.append(spec)
        return artefact(spec)

    monkeypatch.setattr(compiler, "compile_spec", compile_spec)
    monkeypatch.setattr(compiler, "dsl_version", lambda: "1.0")
    return calls


def test_entry_is_parsed_from_ptx():
    made = artefact()
    assert made.entry == "kernel_x"
    assert [(p.size, p.align) for p in made.parameters] == [(128, 64), (16, 8), (4, 4), (8, 8)]
    assert made.threads == (384, 1, 1)


def test_two_entries_are_refused():
    with pytest.raises(ArtefactError, match="2 entries"):
        Artefact.from_compiler(SPEC, cubin(), PTX + PTX, source_hash="s", dsl_version="1")


@pytest.mark.parametrize(("sm", "abi"), [(90, 7), (90, 8)])
def test_round_trip(tmp_path: Path, sm: int, abi: int):
    path = tmp_path / "a.zip"
    store.write_atomically(path, artefact(sm=sm, abi=abi).to_bytes())
    assert Artefact.read(path, SPEC) == artefact(sm=sm, abi=abi)
    assert os.listdir(tmp_path) == ["a.zip"]


def test_equal_artefacts_are_equal_files():
    assert artefact().to_bytes() == artefact().to_bytes()


@pytest.mark.parametrize("abi", [7, 8])
def test_wrong_architecture_is_refused(abi: int):
    with pytest.raises(ArtefactError, match=r"machine code for sm_100, wanted sm_90a"):
        artefact(sm=100, abi=abi)


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "text"])
def test_damaged_file_in_given_folder_is_an_error(tmp_path: Path, fake_compiler, damage: str):
    data = artefact().to_bytes()
    middle = len(data) // 2
    bad = {
        "truncated": data[:middle],
        "flipped": data[:60] + bytes([data[60] ^ 0xFF]) + data[61:],
        "empty": b"",
        "text": b"not an archive" * 20,
    }[damage]
    (tmp_path / store.artefact_filename(SPEC, "1.0")).write_bytes(bad)
    with pytest.raises(ArtefactError, match="damaged artefact"):
        store.ArtefactStore(folder=tmp_path, cache=tmp_path / "cache").load(SPEC)
    assert not fake_compiler


def test_artefact_of_another_spec_is_an_error(tmp_path: Path, fake_compiler):
    other = KernelSpec.create(arch="sm_90a", kind="forward", dtype="float16", head_dim=128)
    (tmp_path / store.artefact_filename(SPEC, "1.0")).write_bytes(artefact(other).to_bytes())
    with pytest.raises(ArtefactError, match=re.escape(f"holds kernel {other.name}, wanted {SPEC.name}")):
        store.ArtefactStore(folder=tmp_path, cache=tmp_path / "cache").load(SPEC)


def test_damaged_file_in_cache_is_made_anew(tmp_path: Path, fake_compiler):
    path = tmp_path / store.artefact_filename(SPEC, "1.0")
    path.write_bytes(b"junk")
    assert store.ArtefactStore(cache=tmp_path).load(SPEC) == artefact()
    assert len(fake_compiler) == 1
    assert Artefact.read(path, SPEC) == artefact()


def test_look_up_order(tmp_path: Path, fake_compiler, monkeypatch):
    """Cache after compiling; the given folder before the cache; the bundled one before both."""
    bundled, folder, cache = tmp_path / "bundled", tmp_path / "folder", tmp_path / "cache"
    monkeypatch.setattr(store, "BUNDLED", bundled)
    the_store = store.ArtefactStore(folder=folder, cache=cache)
    the_store.load(SPEC)
    the_store.load(SPEC)
    assert len(fake_compiler) == 1
    for index, place in enumerate((folder, bundled)):
        place.mkdir()
        marked = Artefact.from_compiler(SPEC, cubin(body=bytes([index])), PTX, source_hash="s", dsl_version="9.9")
        (place / store.artefact_filename(SPEC, "9.9")).write_bytes(marked.to_bytes())
        assert the_store.load(SPEC) == marked
    assert len(fake_compiler) == 1


def test_cache_of_another_dsl_version_is_not_used(tmp_path: Path, fake_compiler, monkeypatch):
    the_store = store.ArtefactStore(cache=tmp_path)
    the_store.load(SPEC)
    monkeypatch.setattr(compiler, "dsl_version", lambda: "2.0")
    the_store.load(SPEC)
    assert len(fake_compiler) == 2


def test_key_changes_with_spec_and_sources(monkeypatch):
    keys = {store.artefact_key(spec) for spec in (SPEC, SPEC.with_tile(Tile(64, 64, 1)))}
    monkeypatch.setattr(compiler, "source_hash", lambda arch: "other")
    keys.add(store.artefact_key(SPEC))
    assert len(keys) == 3


@pytest.mark.parametrize("reason", ["no compiler", "compiling not allowed"])
def test_missing_artefact_names_the_command(tmp_path: Path, fake_compiler, monkeypatch, reason: str):
    if reason == "no compiler":
        monkeypatch.setattr(compiler, "dsl_version", lambda: None)
    the_store = store.ArtefactStore(cache=tmp_path, compile_missing=reason == "no compiler")
    with pytest.raises(store.ArtefactMissingError, match=r"python -m jax_fa4 compile --arch sm_90a --only forward"):
        the_store.load(SPEC)
    assert not list(tmp_path.iterdir())


def test_cache_serves_without_the_compiler(tmp_path: Path, fake_compiler, monkeypatch):
    the_store = store.ArtefactStore(cache=tmp_path)
    made = the_store.load(SPEC)
    monkeypatch.setattr(compiler, "dsl_version", lambda: None)
    assert the_store.load(SPEC) == made


def test_failed_compile_leaves_nothing(tmp_path: Path, monkeypatch):
    def fail(spec):
        raise compiler.CompileError("no")

    monkeypatch.setattr(compiler, "compile_spec", fail)
    monkeypatch.setattr(compiler, "dsl_version", lambda: "1.0")
    with pytest.raises(compiler.CompileError):
        store.ArtefactStore(cache=tmp_path).load(SPEC)
    assert not [path for path in tmp_path.iterdir() if path.suffix != ".lock"]


def test_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch):
    path = tmp_path / "a"
    path.write_bytes(b"old")

    def fail(descriptor):
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        store.write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a"]


def test_concurrent_loads_compile_once(tmp_path: Path, fake_compiler):
    threads = [threading.Thread(target=store.make, args=(SPEC, tmp_path)) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(fake_compiler) == 1


def test_child_environment_has_no_compiler_settings(monkeypatch):
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_80")
    monkeypatch.setenv("CUTE_DSL_KEEP", "all")
    environment = compiler._child_environment()
    assert not [name for name in environment if name.startswith("CUTE_DSL_")]
    assert os.environ["CUTE_DSL_ARCH"] == "sm_80"


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100f"])
def test_compile_a_tiny_kernel(tmp_path: Path, monkeypatch, arch: str):
    """The real compiler, from spec to checked artefact; a hostile environment does not reach it."""
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_80")
    monkeypatch.setitem(compiler.BUILDERS, (arch, "forward"), "tests.tiny_kernel")
    spec = KernelSpec.create(arch=arch, kind="forward", dtype="bfloat16", head_dim=64, tile=Tile(64, 64, 1))
    before = dict(os.environ)
    made = store.ArtefactStore(cache=tmp_path).load(spec)
    assert os.environ == before
    assert f".target {arch}" in made.ptx
    assert [p.size for p in made.parameters] == [16, 4, 4]
    assert made.threads == (128, 1, 1)
    assert [path.name for path in tmp_path.iterdir() if path.name.endswith(store.SUFFIX)] == [
        store.artefact_filename(spec, compiler.dsl_version())
    ]


def test_compiler_failure_is_quoted(monkeypatch):
    pytest.importorskip("cutlass", reason="needs nvidia-cutlass-dsl")
    monkeypatch.setitem(compiler.BUILDERS, ("sm_90a", "forward"), "tests.no_such_module")
    with pytest.raises(compiler.CompileError, match=rf"(?s){SPEC.name}.*No module named 'tests.no_such_module'"):
        compiler.compile_spec(SPEC)


@pytest.mark.parametrize(
    ("head_dim", "padded"),
    [
        ((8, 8), (64, 64)),
        ((64, 64), (64, 64)),
        ((72, 72), (96, 96)),
        ((104, 104), (128, 128)),
        ((136, 136), (192, 192)),
        ((200, 200), (256, 256)),
        ((192, 128), (192, 128)),
        ((64, 128), (64, 128)),
        ((72, 128), (128, 128)),
        ((128, 64), (128, 128)),
        ((136, 8), (192, 128)),
        ((64, 256), (256, 256)),
    ],
)
def test_padding(head_dim: tuple[int, int], padded: tuple[int, int]):
    assert padded_head_dims(*head_dim) == padded
    spec = KernelSpec.create(
        arch="sm_90a", kind="forward", dtype="float16", head_dim=head_dim[0], head_dim_v=head_dim[1]
    )
    assert (spec.head_dim, spec.head_dim_v) == padded
    assert spec in standard_specs(["sm_90a"])


@pytest.mark.parametrize("head_dim_v", [0, 100, 264])
def test_bad_value_head_dims_are_named(head_dim_v: int):
    with pytest.raises(UnsupportedSpecError, match=f"head_dim_v is {head_dim_v}"):
        KernelSpec.create(arch="sm_90a", kind="forward", dtype="float16", head_dim=64, head_dim_v=head_dim_v)


@pytest.mark.parametrize("head_dim", [0, -8, 4, 100, 264])
def test_bad_head_dims_are_named(head_dim: int):
    with pytest.raises(UnsupportedSpecError, match=rf"head_dim is {head_dim}; .*multiples of 8 from 8 to 256"):
        KernelSpec.create(arch="sm_90a", kind="forward", dtype="bfloat16", head_dim=head_dim)


@pytest.mark.parametrize(
    ("field", "value"), [("arch", "sm_80"), ("kind", "sideways"), ("dtype", "float32"), ("mask", "prefix")]
)
def test_bad_fields_are_named(field: str, value: str):
    fields = {"arch": "sm_90a", "kind": "forward", "dtype": "bfloat16", "head_dim": 64, field: value}
    with pytest.raises(UnsupportedSpecError, match=rf"{field} is '{value}'; allowed: "):
        KernelSpec.create(**fields)


def test_standard_specs_are_distinct_and_survive_json():
    specs = standard_specs(["sm_90a"])
    assert len({spec.name for spec in specs}) == len({spec.digest() for spec in specs}) == len(specs) > 0
    assert [KernelSpec.from_json(spec.to_json()) for spec in specs] == specs


def test_compile_command(tmp_path: Path, fake_compiler, capsys):
    import argparse

    from jax_fa4.cli import compile as command

    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())

    def run(*words: str) -> int:
        arguments = parser.parse_args(["compile", *words])
        return arguments.run(arguments)

    wanted = [spec for spec in standard_specs(["sm_90a"], ["forward"]) if "float16_d64x64" in spec.name]
    assert run("--arch", "sm_90a", "--only", "forward", "--match", "float16_d64x64", "--out", str(tmp_path)) == 0
    assert len(fake_compiler) == len(wanted) > 0
    assert all(store.ArtefactStore(folder=tmp_path).load(spec) for spec in wanted)
    assert run("--arch", "sm_80") == 2
    assert "arch is 'sm_80'" in capsys.readouterr().err

    old = tmp_path / wanted[0].name.join(("", "-of-other-sources-dsl1.0" + store.SUFFIX))
    notes = tmp_path / "notes.txt"
    old.touch()
    notes.touch()
    again = ("--arch", "sm_90a", "--only", "forward", "--match", "float16_d64x64", "--prune")
    assert run(*again) == 2 and "--prune needs --out" in capsys.readouterr().err
    assert run(*again, "--out", str(tmp_path)) == 0
    assert "1 other artefacts deleted" in capsys.readouterr().out
    assert not old.exists() and notes.exists()
    assert all(store.ArtefactStore(folder=tmp_path).load(spec) for spec in wanted)


def test_a_build_takes_the_artefacts_that_are_there():
    """Git ignores them, so that the build would leave them out if its configuration did not name them."""
    root = Path(__file__).parents[1]
    (pattern,) = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["scikit-build"]["sdist"]["include"]
    file = store.BUNDLED / store.artefact_filename(SPEC, "4.8.1")
    assert fnmatch.fnmatch(file.relative_to(root).as_posix(), pattern)
    assert not fnmatch.fnmatch(file.relative_to(root).as_posix() + ".lock", pattern)
