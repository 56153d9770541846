"""The parent side of the self-test: hands cases to a worker process, with a time limit for each.

A worker that exceeds the limit or dies is replaced; its case is reported as such and the next one goes on. The worker
is kept between cases because starting JAX takes seconds.
"""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from jax_fa4.selftest.cases import Case


@dataclass(frozen=True)
class Outcome:
    """A case and what came of it: ``answer`` is the worker's JSON object, always with a boolean ``held``."""

    case: Case
    answer: dict

    @property
    def held(self) -> bool:
        return bool(self.answer["held"])


def worker_command(implementation: str) -> list[str]:
    """Command line of the worker."""
    return [sys.executable, "-m", "jax_fa4.selftest.worker", implementation]


class Worker:
    """One child process and the thread that reads its answers."""

    def __init__(self, command: Sequence[str]):
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self._answers: queue.Queue[str] = queue.Queue()
        self._errors: list[str] = []
        threading.Thread(target=self._read_answers, daemon=True).start()
        threading.Thread(target=self._read_errors, daemon=True).start()

    def _read_answers(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put("")

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._errors = [*self._errors[-19:], line.rstrip()]

    def ask(self, case: Case, limit: float) -> tuple[dict, bool]:
        """The answer to one case and whether the worker can be used again."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(case.to_json()) + "\n")
            self._process.stdin.flush()
            line = self._answers.get(timeout=limit)
        except queue.Empty:
            return {"held": False, "failure": f"no answer within {limit:g} s: the kernel hangs or is very slow"}, False
        except OSError:
            line = ""
        if not line:
            code = self._process.wait()
            tail = " | ".join(self._errors[-3:])
            return {"held": False, "failure": f"the worker died with exit status {code}: {tail}"}, False
        return json.loads(line), True

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


def run_cases(
    cases: Iterable[Case], *, command: Sequence[str], limit: float, report: Callable[[Outcome], None] = lambda _: None
) -> list[Outcome]:
    """Runs the cases in order.

    Args:
      cases: what to run.
      command: the worker's command line, see :func:`worker_command`.
      limit: seconds allowed for one case, compilation included.
      report: called after each case.
    """
    outcomes = []
    worker: Worker | None = None
    try:
        for case in cases:
            if worker is None:
                worker = Worker(command)
            answer, usable = worker.ask(case, limit)
            outcomes.append(Outcome(case, answer))
            report(outcomes[-1])
            if not usable:
                worker.stop()
                worker = None
    finally:
        if worker is not None:
            worker.stop()
    return outcomes
