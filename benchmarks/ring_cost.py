"""What sequence parallelism costs, from kernel speed and link bandwidth: a model, its error, and what it predicts.

    python benchmarks/ring_cost.py --rows parallel.csv --link 302 --gather 219 --exchange 279 [--plot curve.png]

``--rows`` is what ``benchmarks/parallel.py --csv`` wrote; the bandwidths are what it prints (GB/s that one GPU sends in
one direction: ppermute, all_gather, all_to_all). Each measured row is predicted from the speed of one GPU in the same
file; then the curve from 2 to 512 GPUs is drawn, which beyond the measured numbers of GPUs is a prediction, and beyond
one host rests on ``--host`` and ``--network`` alone.

The model, for P GPUs and length T, a call's work spread evenly (causal in zigzag order, or full):

- ring, forward: P stops of equal work. While one is computed, the next piece of K/V arrives; a stop takes the longer of
  the two, the last one its work alone. Partial results merge in float32 at each stop but the first.
- ring, backward: the same with dK/dV in float32 one stop behind, on the same links, and one hop home at the end.
- all-gather: head groups; the first group's K/V arrives unhidden, the others' while a group is computed. K/V are put in
  order once. Backward: reduce-scatters likewise, the last one unhidden.
- Ulysses: query, key, value there and output back, unhidden, each put in order; the backward the same for gradients.

Every call costs ``--call`` seconds besides (launches, waiting for each other), every stop ``--stop``. A GPU's speed is
that of long calls: where pieces come down to a few hundred tokens, the curve is too high.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

STRATEGIES = ("ring", "all_gather", "ulysses")
CURVE = (2, 4, 8, 16, 32, 64, 128, 256, 512)
HEAD_DIM = 128


@dataclass(frozen=True)
class Machine:
    """Speeds: TFLOP/s of one GPU (``forward``; ``both`` for forward and backward together), GB/s, seconds.

    ``link``, ``gather`` and ``exchange``: what one GPU sends in one direction within a host by ppermute, all-gather
    and all-to-all. ``memory``: bytes read and written. ``network``: what one GPU sends to other hosts.
    """

    forward: float
    both: float
    link: float
    gather: float
    exchange: float
    memory: float
    network: float
    host: int
    call: float
    stop: float

    def spanning(self, devices: int) -> Machine:
        """The same with the bandwidths that remain where ``devices`` GPUs span several hosts.

        A ring crosses between hosts on one GPU's share of the network, and its slowest edge sets the pace of all. An
        all-gather's rings cross by all of a host's shares at once. In an all-to-all nearly all leaves the host.
        """
        if devices <= self.host:
            return self
        leaving = (devices - self.host) / (devices - 1)
        return dataclasses.replace(
            self,
            link=min(self.link, self.network),
            gather=min(self.gather, self.network * self.host),
            exchange=1 / (leaving / self.network + (1 - leaving) / self.exchange),
        )


@dataclass(frozen=True)
class Problem:
    """A call on ``devices`` GPUs: batch 1, bfloat16."""

    strategy: str
    causal: bool
    backward: bool
    length: int
    heads: int
    key_heads: int
    devices: int
    head_dim: int = HEAD_DIM

    @property
    def forward_flop(self) -> float:
        """Of the forward on one GPU."""
        return 4.0 * self.heads * self.length**2 * self.head_dim / (2 if self.causal else 1) / self.devices

    @property
    def flop(self) -> float:
        """Of the call on one GPU."""
        return self.forward_flop * (3.5 if self.backward else 1.0)

    @property
    def rows(self) -> float:
        """Elements of query, of the output and of their gradients on one GPU."""
        return self.length / self.devices * self.heads * self.head_dim

    @property
    def pair(self) -> float:
        """Elements of key and value together on one GPU."""
        return 2.0 * self.length / self.devices * self.key_heads * self.head_dim


def predict(problem: Problem, machine: Machine) -> float:
    """Seconds of one call."""
    machine = machine.spanning(problem.devices)
    times = {"ring": _ring, "all_gather": _all_gather, "ulysses": _ulysses}[problem.strategy]
    forward = problem.forward_flop / (machine.forward * 1e12)
    seconds = machine.call + times(problem, machine, forward, backward=False)
    if problem.backward:
        backward = problem.flop / (machine.both * 1e12) - forward
        seconds += machine.call + times(problem, machine, backward, backward=True)
    return seconds


def tflops(problem: Problem, machine: Machine) -> float:
    """Predicted TFLOP/s of each GPU."""
    return problem.flop / predict(problem, machine) / 1e12


def _moved(elements: float, width: float, machine: Machine) -> float:
    """Seconds for reading or writing so many elements of ``width`` bytes."""
    return elements * width / (machine.memory * 1e9)


def _ring(problem: Problem, machine: Machine, work: float, backward: bool) -> float:
    count = problem.devices
    stop = work / count + machine.stop
    transfer = problem.pair * 2 / (machine.link * 1e9)
    # A causal stop merges half the rows half of the time and all of them else.
    rows = problem.rows * (0.75 if problem.causal and count > 1 else 1.0)
    if not backward:
        merge = _moved(rows, 4 + 4 + 2, machine)
        ends = _moved(problem.rows, 2 + 4 + 4 + 2, machine)  # into float32 and back
        return (count - 1) * max(stop, transfer) + stop + (count - 1) * merge + ends
    home = problem.pair * 4 / (machine.link * 1e9) if count > 1 else 0.0
    transfer += problem.pair * 4 / (machine.link * 1e9)
    merge = _moved(rows, 4 + 4 + 2, machine) + _moved(problem.pair, 2 + 4 + 4 + 4, machine)
    ends = _moved(problem.rows + problem.pair, 2 + 4 + 4 + 2, machine)
    return (count - 1) * max(stop, transfer) + stop + home + (count - 1) * merge + ends


def _all_gather(problem: Problem, machine: Machine, work: float, backward: bool) -> float:
    groups = next(n for n in (4, 2, 1) if problem.key_heads % n == 0)
    received = problem.pair * (problem.devices - 1) * 2
    transfer = received / groups / (machine.gather * 1e9)
    whole = problem.pair * problem.devices
    order = _moved(whole, 2 + 2, machine) if problem.causal and problem.devices > 1 else 0.0
    if backward and problem.causal:  # gradients of both query chunks add up first
        order += _moved(whole, 2 + 2 + 2, machine)
    part = work / groups + machine.stop + order / groups
    return transfer + (groups - 1) * max(part, transfer) + part + _moved(problem.rows, 2 + 2, machine)


def _ulysses(problem: Problem, machine: Machine, work: float, backward: bool) -> float:
    count = problem.devices
    copies = max(1, count // problem.key_heads)
    # There: query, key, value. Back: the output. The backward sends its cotangent there and three gradients back.
    elements = 2 * problem.rows + problem.pair * copies
    transfer = elements * 2 * (count - 1) / count / (machine.exchange * 1e9)
    order = _moved(elements, 2 * (2 + 2), machine) if count > 1 else 0.0  # before and after each exchange
    return work + machine.stop + transfer + order


def read_rows(path: Path) -> list[dict[str, str]]:
    """What ``benchmarks/parallel.py --csv`` wrote."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def problem_of(row: dict[str, str]) -> Problem:
    """The problem of one measured row."""
    heads, key_heads = map(int, row["heads"].split("/"))
    return Problem(
        row["strategy"],
        row["mask"] == "causal",
        row["direction"] == "both",
        int(row["length"]),
        heads,
        key_heads,
        int(row["devices"]),
    )


def alone(rows: Iterable[dict[str, str]], row: dict[str, str], direction: str) -> float:
    """TFLOP/s of one GPU for a row's mask, heads and length, as measured in the same file."""
    same = [x for x in rows if all(x[name] == row[name] for name in ("mask", "heads", "length", "devices"))]
    found = [float(x["alone_tflops"]) for x in same if x["direction"] == direction]
    if not found:
        raise ValueError(f"--rows: no {direction} row for {row['mask']}, {row['heads']} heads, T = {row['length']}")
    return found[0]


def compare(rows: Sequence[dict[str, str]], machine: Machine) -> list[tuple[dict[str, str], float]]:
    """(row, predicted TFLOP/s) for each measured row."""
    found = []
    for row in rows:
        forward = alone(rows, row, "forward")
        both = alone(rows, row, "both") if row["direction"] == "both" else forward
        found.append((row, tflops(problem_of(row), dataclasses.replace(machine, forward=forward, both=both))))
    return found


def measured_table(compared: Sequence[tuple[dict[str, str], float]]) -> list[str]:
    """Markdown lines: measured beside predicted."""
    lines = [
        "| strategy | direction | mask | heads | GPUs | T | measured TFLOP/s | predicted | error |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row, predicted in compared:
        measured = float(row["tflops"])
        cells = [row[name] for name in ("strategy", "direction", "mask", "heads", "devices", "length")]
        cells += [f"{measured:.1f}", f"{predicted:.1f}", f"{predicted / measured - 1:+.1%}"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def predicted_table(machine: Machine, lengths: Sequence[int], heads: Sequence[tuple[int, int]]) -> list[str]:
    """Markdown lines: TFLOP/s per GPU by number of GPUs. Ulysses has no entry beyond as many GPUs as query heads."""
    lines = [
        f"| strategy | direction | mask | heads | T | {' | '.join(map(str, CURVE))} |",
        f"| {' | '.join(['---'] * (5 + len(CURVE)))} |",
    ]
    choices = itertools.product(heads, (True, False), (False, True), lengths, STRATEGIES)
    for (n, k), causal, backward, length, strategy in choices:
        cells = [strategy, "both" if backward else "forward", "causal" if causal else "full", f"{n}/{k}", str(length)]
        for count in CURVE:
            problem = Problem(strategy, causal, backward, length, n, k, count)
            cells.append("" if strategy == "ulysses" and n % count else f"{tflops(problem, machine):.0f}")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def plot(path: Path, machine: Machine, lengths: Sequence[int], heads: tuple[int, int], rows: Sequence[dict]) -> None:
    """TFLOP/s per GPU over the number of GPUs, causal, forward and backward; measured points where there are any."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(lengths), figsize=(5 * len(lengths), 4), sharey=True, squeeze=False)
    colors = dict(zip(STRATEGIES, ("tab:blue", "tab:orange", "tab:green"), strict=True))
    for panel, length in zip(panels[0], lengths, strict=True):
        for strategy in STRATEGIES:
            counts = [n for n in CURVE if strategy != "ulysses" or heads[0] % n == 0]
            rates = [tflops(Problem(strategy, True, True, length, *heads, n), machine) for n in counts]
            panel.plot(counts, rates, "--", color=colors[strategy], label=f"{strategy}, prediction")
            points = [
                (int(row["devices"]), float(row["tflops"]))
                for row in rows
                if (row["strategy"], row["direction"], row["mask"], int(row["length"]))
                == (strategy, "both", "causal", length)
                and row["heads"] == f"{heads[0]}/{heads[1]}"
            ]
            if points:
                panel.plot(*zip(*points, strict=True), "o", color=colors[strategy], label=f"{strategy}, measured")
        panel.axhline(machine.both, color="gray", linewidth=0.8)
        panel.axvline(machine.host, color="gray", linewidth=0.8, linestyle=":")
        panel.set(
            xscale="log", xlabel="GPUs", title=f"T = {length:,}, causal, {heads[0]}/{heads[1]} heads", ylim=(0, None)
        )
        panel.set_xticks(CURVE, [str(n) for n in CURVE])
        panel.minorticks_off()
    panels[0][0].set_ylabel("TFLOP/s per GPU, forward and backward")
    panels[0][0].legend(fontsize="small")
    figure.suptitle("Prediction of a cost model; one GPU: upper line, one host: dotted", fontsize="medium")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def heads_of(text: str) -> tuple[int, int]:
    """Reads "64/8"."""
    try:
        n, k = map(int, text.split("/"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"got {text!r}; expected QUERY_HEADS/KEY_HEADS, such as 64/8") from None
    return n, k


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, help="measured rows, from benchmarks/parallel.py --csv")
    parser.add_argument("--forward", type=float, default=650.0, help="TFLOP/s of one GPU, for the curve")
    parser.add_argument("--both", type=float, default=615.0, help="the same, forward and backward")
    parser.add_argument("--link", type=float, default=302.0, help="ppermute, GB/s (default %(default)s)")
    parser.add_argument("--gather", type=float, default=219.0, help="all-gather, GB/s (default %(default)s)")
    parser.add_argument("--exchange", type=float, default=279.0, help="all-to-all, GB/s (default %(default)s)")
    parser.add_argument("--memory", type=float, default=3300.0, help="of merges and copies, GB/s (default %(default)s)")
    parser.add_argument("--network", type=float, default=50.0, help="between hosts, GB/s a GPU (default %(default)s)")
    parser.add_argument("--host", type=int, default=8, help="GPUs of one host (default %(default)s)")
    parser.add_argument("--call", type=float, default=3e-4, help="seconds for each call (default %(default)s)")
    parser.add_argument("--stop", type=float, default=5e-5, help="seconds for each stop (default %(default)s)")
    parser.add_argument("--lengths", nargs="+", type=int, default=[2**17, 2**18, 2**19, 2**20])
    parser.add_argument("--heads", nargs="+", type=heads_of, default=[(16, 16), (64, 8)], metavar="N/K")
    parser.add_argument("--plot", type=Path, help="picture of the curves of the first of --heads")
    arguments = parser.parse_args(argv)
    names = [field.name for field in dataclasses.fields(Machine)]
    machine = Machine(**{name: getattr(arguments, name) for name in names})
    rows = [] if arguments.rows is None else read_rows(arguments.rows)
    if rows:
        compared = compare(rows, machine)
        errors = [abs(predicted / float(row["tflops"]) - 1) for row, predicted in compared]
        print("\n".join(measured_table(compared)))
        print(f"\nlargest error {max(errors):.1%}, mean {sum(errors) / len(errors):.1%}\n")
    print("Prediction, TFLOP/s per GPU by number of GPUs:\n")
    print("\n".join(predicted_table(machine, arguments.lengths, arguments.heads)))
    if arguments.plot is not None:
        plot(arguments.plot, machine, arguments.lengths, arguments.heads[0], rows)


if __name__ == "__main__":
    main()
