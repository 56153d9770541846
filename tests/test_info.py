"""``python -m jax_fa4`` and its ``info``."""

import json
import subprocess
import sys

import jax
import pytest

import jax_fa4
from jax_fa4.__main__ import main
from jax_fa4.cli import info
from jax_fa4.kernels import store
from jax_fa4.kernels.spec import standard_specs


def test_every_subcommand_explains_itself(capsys):
    for command in ("info", "compile", "selftest", "bench"):
        with pytest.raises(SystemExit) as stop:
            main([command, "--help"])
        assert stop.value.code == 0
        assert command in capsys.readouterr().out
    with pytest.raises(SystemExit) as stop:
        main(["no-such-command"])
    assert stop.value.code == 2


def test_info_says_what_runs_and_why(capsys):
    assert main(["info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["versions"]["jax_fa4"] == jax_fa4.__version__
    assert facts["versions"]["jax"] == jax.__version__
    assert [device["id"] for device in facts["devices"]] == [device.id for device in jax.devices()]
    # Nothing is invented: each line is what `supports` says of the call.
    for name, arguments in info.typical_calls().items():
        support = jax_fa4.supports(**arguments)
        assert facts["calls"][name]["implementation"] == support.implementation
        if support.implementation != "fa4":
            assert facts["calls"][name]["reasons"]["fa4"], "a call that the kernels do not serve has a reason"


def test_info_as_text():
    command = [sys.executable, "-m", "jax_fa4", "info"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    for name, arguments in info.typical_calls().items():
        assert f"  {name}: {jax_fa4.supports(**arguments).implementation}\n" in result.stdout
    assert f"jax_fa4             {jax_fa4.__version__}\n" in result.stdout


def test_kernels_are_counted_by_architecture(tmp_path):
    for spec in [*standard_specs(["sm_90a"])[:3], *standard_specs(["sm_100f"])[:2]]:
        (tmp_path / store.artefact_filename(spec, "1.2")).write_bytes(b"")
    assert info._count(tmp_path) == {"sm_90a": 3, "sm_100f": 2}
    assert info._count(tmp_path / "absent") == {"sm_90a": 0, "sm_100f": 0}
