"""What a run leaves behind: a log of JSON lines, a plot of the loss and checkpoints."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import jax
import orbax.checkpoint as ocp

KEPT_CHECKPOINTS = 2


class Log:
    """One JSON object a line. Opening it for a resumed run drops the lines of steps that are trained again."""

    def __init__(self, path: pathlib.Path, start_step: int):
        self._path = path
        entries = read_log(path) if path.exists() else []
        kept = [entry for entry in entries if entry["step"] <= start_step]
        path.write_text("".join(json.dumps(entry) + "\n" for entry in kept))

    def write(self, **entry: Any) -> None:
        """Appends one line; ``step`` is required."""
        with self._path.open("a") as file:
            file.write(json.dumps(entry) + "\n")


def read_log(path: pathlib.Path) -> list[dict[str, Any]]:
    """Reads a log back; a last line that was cut off while it was written is left out."""
    entries = []
    for line in path.read_text().splitlines():
        try:
            entries.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return entries


def plot(log: pathlib.Path, picture: pathlib.Path) -> None:
    """Draws training and held-out bits per byte over the steps of ``log`` as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    entries = read_log(log)
    figure, axes = pyplot.subplots(figsize=(7, 4), dpi=120, layout="constrained")
    for kind, style in (("train", {"linewidth": 0.8}), ("held_out", {"marker": "o", "linewidth": 1.5})):
        points = [(entry["step"], entry["bits_per_byte"]) for entry in entries if entry["kind"] == kind]
        axes.plot(*zip(*points, strict=True), label=kind.replace("_", "-"), **style)
    axes.set(xlabel="step", ylabel="bits per byte", title="Byte-level language model")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(picture)
    pyplot.close(figure)


class Checkpoints:
    """Training states on disk, written atomically (a folder is renamed when it is complete)."""

    def __init__(self, folder: pathlib.Path):
        options = ocp.CheckpointManagerOptions(max_to_keep=KEPT_CHECKPOINTS, enable_async_checkpointing=False)
        self._manager = ocp.CheckpointManager(folder.absolute(), options=options)

    @property
    def latest_step(self) -> int:
        """The step of the newest complete checkpoint, 0 if there is none."""
        return self._manager.latest_step() or 0

    def save(self, step: int, state: Any, run: dict[str, Any]) -> None:
        """Writes ``state`` and the description of the run that it belongs to, and waits until both are on disk."""
        arguments = ocp.args.Composite(state=ocp.args.StandardSave(state), run=ocp.args.JsonSave(run))
        self._manager.save(step, args=arguments)
        self._manager.wait_until_finished()

    def restore(self, abstract_state: Any, run: dict[str, Any]) -> Any:
        """Reads the newest state into the shapes, dtypes and shardings of ``abstract_state``.

        Raises:
            ValueError: it was written by a run with another description (other sizes of the model, for example).
        """
        step = self.latest_step
        saved = self._manager.restore(step, args=ocp.args.Composite(run=ocp.args.JsonRestore())).run
        different = [
            f"{name}: {saved.get(name)!r} there, {run.get(name)!r} now"
            for name in sorted(saved.keys() | run.keys())
            if saved.get(name) != run.get(name)
        ]
        if different:
            raise ValueError(
                f"the checkpoint of step {step} belongs to another run ({'; '.join(different)}):"
                " choose another --out or pass --fresh"
            )
        restored = self._manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(abstract_state)))
        return restored.state

    def clear(self) -> None:
        """Deletes every checkpoint."""
        for step in self._manager.all_steps():
            self._manager.delete(step)

    def close(self) -> None:
        """Ends the manager's threads."""
        self._manager.close()


def abstract(state: Any, shardings: Any) -> Any:
    """``state`` (arrays or ShapeDtypeStructs) as ShapeDtypeStructs that carry ``shardings``."""

    def place(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(place, state, shardings)
