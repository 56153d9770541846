"""The self-test's machinery, without a GPU: answers, wrong kernels, hanging and dying workers."""

from __future__ import annotations

import json
import sys
import textwrap

import pytest

from jax_fa4.selftest import worker
from jax_fa4.selftest.cases import Case, standard
from jax_fa4.selftest.runner import run_cases, worker_command

SMALL = {"shape": (2, 30, 41), "heads": (4, 2)}


def test_real_worker_reports_a_right_implementation_as_held() -> None:
    cases = [
        Case("forward", (16, 16), "causal", **SMALL),
        Case("backward", (16, 8), "lengths", **SMALL),
        Case("repeat", (16, 16), "window", calls=3, **SMALL),
    ]
    outcomes = run_cases(cases, command=worker_command("blockwise"), limit=180)
    assert [o.case for o in outcomes] == cases
    for outcome in outcomes:
        assert outcome.held, outcome.answer
    assert set(outcomes[1].answer["errors"]) == {"d_query", "d_key", "d_value"}


def test_wrong_numbers_do_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    real = worker._results

    def wrong(case, implementation, dtype):
        results = real(case, "xla", dtype)
        if implementation == "broken":
            results["out"] = results["out"].copy()
            results["out"][0, 3] += 0.1
        return results

    monkeypatch.setattr(worker, "_results", wrong)
    case = Case("forward", (16, 16), "full", **SMALL)
    assert worker.answer(case.to_json(), "xla")["held"]
    assert not worker.answer(case.to_json(), "broken")["held"]


def test_unknown_implementation_is_a_failure_with_its_message() -> None:
    answer = worker.answer(Case("forward", (16, 16), "full", **SMALL).to_json(), "no_such")
    assert not answer["held"]
    assert "no_such" in answer["failure"]


def script(body: str) -> list[str]:
    head = "import json, sys, time\nfor line in sys.stdin:\n    case = json.loads(line)\n"
    return [sys.executable, "-c", head + textwrap.indent(textwrap.dedent(body), "    ")]


def test_hanging_and_dying_cases_are_lines_of_the_report() -> None:
    cases = [Case("forward", (d, d), "full") for d in (8, 16, 24, 32)]
    command = script(
        """
        if case["head_dims"][0] == 16:
            time.sleep(1000)
        if case["head_dims"][0] == 24:
            print("illegal memory access", file=sys.stderr, flush=True)
            sys.exit(7)
        print(json.dumps({"held": True}), flush=True)
        """
    )
    outcomes = run_cases(cases, command=command, limit=5)
    assert [o.held for o in outcomes] == [True, False, False, True]
    assert "no answer within 5 s" in outcomes[1].answer["failure"]
    assert "status 7" in outcomes[2].answer["failure"]
    assert "illegal memory access" in outcomes[2].answer["failure"]


@pytest.mark.parametrize("quick", [False, True])
def test_standard_cases_are_distinct_and_survive_json(quick: bool) -> None:
    cases = standard(quick)
    assert len({c.name for c in cases}) == len(cases)
    assert {c.kind for c in cases} == {"forward", "backward", "repeat", "speed"}
    assert [Case.from_json(json.loads(json.dumps(c.to_json()))) for c in cases] == cases
