"""Text for the language model: files on disk -> byte arrays -> batches.

A byte is a token, so no tokenizer is needed and "bits per byte" is the cross entropy itself.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import pathlib
import sysconfig

import numpy as np

VOCABULARY_SIZE = 256
"""One token per byte value."""

HELD_OUT_PERCENT = 5
"""Share of the files (not of the bytes) that the model never trains on."""

SKIPPED_FOLDERS = frozenset({"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test"})
"""Left out of the default text: installed packages, and tests, which not every Python installation ships."""

TEXT_SUFFIXES = frozenset({".py", ".pyi", ".txt", ".md", ".rst", ".c", ".cc", ".cpp", ".h", ".hpp", ".cu", ".toml"})
"""What ``--data DIR`` reads."""


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Training and held-out text as flat uint8 arrays, and how many files each came from."""

    train: np.ndarray
    held_out: np.ndarray
    train_files: int
    held_out_files: int


def text_files(folder: pathlib.Path, suffixes: frozenset[str], skipped: frozenset[str] = frozenset()) -> list[str]:
    """Lists files under ``folder`` as sorted POSIX paths relative to it: the order does not depend on the disk."""
    found = []
    for root, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in skipped and not name.startswith(".")]
        relative = pathlib.Path(root).relative_to(folder)
        found += [(relative / name).as_posix() for name in names if pathlib.Path(name).suffix in suffixes]
    return sorted(found)


def is_held_out(relative_path: str) -> bool:
    """Whether a file belongs to the held-out part: decided by its name alone, so it is the same on every machine."""
    digest = hashlib.sha256(relative_path.encode()).digest()
    return int.from_bytes(digest[:4], "big") % 100 < HELD_OUT_PERCENT


def load_corpus(folder: str | os.PathLike[str] | None = None) -> Corpus:
    """Reads the text and splits it by file.

    Args:
        folder: where text files lie; ``None`` takes the sources of the standard library of the running Python.

    Raises:
        ValueError: no text was found, or too little of it to hold some out.
    """
    if folder is None:
        root = pathlib.Path(sysconfig.get_path("stdlib"))
        names = text_files(root, frozenset({".py"}), SKIPPED_FOLDERS)
    else:
        root = pathlib.Path(folder)
        if not root.is_dir():
            raise ValueError(f"--data: {root} is not a folder")
        names = text_files(root, TEXT_SUFFIXES)
    held_out_names = [name for name in names if is_held_out(name)]
    train_names = [name for name in names if not is_held_out(name)]
    if not train_names or not held_out_names:
        raise ValueError(
            f"{root} holds {len(names)} text files, of which {len(held_out_names)} would be held out;"
            " training needs at least one file in each part"
        )
    return Corpus(
        train=_concatenate(root, train_names),
        held_out=_concatenate(root, held_out_names),
        train_files=len(train_names),
        held_out_files=len(held_out_names),
    )


def _concatenate(root: pathlib.Path, names: list[str]) -> np.ndarray:
    return np.frombuffer(b"\n".join((root / name).read_bytes() for name in names), dtype=np.uint8)


def windows(text: np.ndarray, starts: np.ndarray, length: int) -> np.ndarray:
    """Cuts windows of ``length`` bytes out of ``text`` at ``starts`` (N,); returns int32 (N, length)."""
    return text[starts[:, None] + np.arange(length)[None, :]].astype(np.int32)


def training_batch(text: np.ndarray, step: int, batch: int, seq_len: int, seed: int) -> np.ndarray:
    """The batch of one step, int32 (batch, seq_len + 1): inputs and, shifted by one, targets.

    It depends on ``seed`` and ``step`` only, so that a resumed run sees what the interrupted run would have seen.

    Raises:
        ValueError: the text is shorter than one window.
    """
    check_length(text, seq_len, "training")
    generator = np.random.default_rng([seed, step])
    starts = generator.integers(0, len(text) - seq_len, size=batch)
    return windows(text, starts, seq_len + 1)


def held_out_batches(text: np.ndarray, count: int, batch: int, seq_len: int) -> list[np.ndarray]:
    """``count`` batches, int32 (batch, seq_len + 1), spread evenly over the held-out text: the same ones every time."""
    check_length(text, seq_len, "held-out")
    starts = np.linspace(0, len(text) - seq_len - 1, num=count * batch).astype(np.int64)
    return [windows(text, part, seq_len + 1) for part in np.split(starts, count)]


def check_length(text: np.ndarray, seq_len: int, part: str) -> None:
    """Raises ValueError unless ``text`` holds at least one window of ``seq_len + 1`` bytes."""
    if len(text) < seq_len + 1:
        raise ValueError(f"--seq-len: the {part} text has {len(text)} bytes, one window needs {seq_len + 1}")
