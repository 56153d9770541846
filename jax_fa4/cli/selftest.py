"""``python -m jax_fa4 selftest``: check the kernels on the GPU at hand and report."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import jax

import jax_fa4
from jax_fa4.selftest.cases import standard
from jax_fa4.selftest.runner import Outcome, run_cases, worker_command


def add_parser(subparsers: argparse._SubParsersAction) -> None:
    """Adds the ``selftest`` subcommand; its ``run`` default is :func:`run`."""
    parser = subparsers.add_parser("selftest", help="check the kernels on the GPU at hand")
    parser.add_argument("--quick", action="store_true", help="one case per kernel, about a minute")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the full report to FILE")
    parser.add_argument("--timeout", type=float, default=120.0, metavar="SECONDS", help="limit for one case")
    parser.set_defaults(run=run)


def _line(outcome: Outcome) -> str:
    answer = outcome.answer
    if "failure" in answer:
        detail = answer["failure"].splitlines()[0]
    elif "errors" in answer:
        detail = ", ".join(f"{n} {e['error']:.1e} of {e['allowed']:.1e}" for n, e in answer["errors"].items())
    elif "tflops" in answer:
        rates = answer["tflops"].items()
        detail = "; ".join(
            f"{n} {r['forward']:.0f} forward, {r['backward']:.0f} backward TFLOP/s"
            if isinstance(r, dict)
            else f"{n}: {r}"
            for n, r in rates
        )
    else:
        detail = f"{answer['different']} of {answer['calls']} calls differ"
    return f"{'ok    ' if outcome.held else 'FAILED'} {outcome.case.name}: {detail}"


def machine() -> dict:
    """Versions and the GPU at hand, for the report; ``gpu`` is None where JAX finds none."""
    facts: dict = {"jax_fa4": jax_fa4.__version__, "jax": jax.__version__, "gpu": None}
    # A child asks, so that this process holds no GPU memory while the worker measures.
    question = (
        "import jax, json; d = jax.devices('gpu')[0];"
        "v = jax.extend.backend.get_backend().platform_version;"
        "print(json.dumps([d.device_kind, str(d.compute_capability), v]))"
    )
    reply = subprocess.run([sys.executable, "-c", "import jax.extend\n" + question], capture_output=True, text=True)
    if reply.returncode == 0:
        kind, capability, platform = json.loads(reply.stdout.splitlines()[-1])
        facts |= {"gpu": kind, "compute_capability": capability, "platform": platform}
    else:
        facts["reason"] = reply.stderr.strip().splitlines()[-1] if reply.stderr.strip() else "unknown"
    return facts


def run(arguments: argparse.Namespace) -> int:
    """Runs the self-test; the exit status is 0 where all cases held, 1 where one did not, 2 where there is no GPU."""
    facts = machine()
    if facts["gpu"] is None:
        print(f"no GPU for the kernels here ({facts['reason']}); there is nothing to test")
        return 2
    print(", ".join(f"{k} {v}" for k, v in facts.items()))
    outcomes = run_cases(
        standard(arguments.quick),
        command=worker_command("fa4"),
        limit=arguments.timeout,
        report=lambda outcome: print(_line(outcome), flush=True),
    )
    failed = summarise(outcomes)
    if arguments.json is not None:
        report = {"machine": facts, "cases": [{**o.case.to_json(), "answer": o.answer} for o in outcomes]}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if failed else 0


def summarise(outcomes: Sequence[Outcome]) -> int:
    """Prints the closing line and returns how many cases failed."""
    failed = sum(not o.held for o in outcomes)
    print(f"{len(outcomes) - failed} cases held, {failed} failed")
    return failed
