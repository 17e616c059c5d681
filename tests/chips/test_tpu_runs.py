"""Programs that are lowered for a TPU run on the CPU, as far as JAX and hostcall go.

JAX's lowering for TPUs asks libtpu's description of a v5e, and none of its hardware:
`make test-chips` installs it. What libtpu itself does with a send is not shown.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import tpu_runs


@pytest.fixture(scope="module")
def outcomes():
    """case -> what went wrong, or "" """
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("needs the package of libtpu (make test-chips)")
    program = Path(__file__).with_name("tpu_runs.py")
    done = subprocess.run([sys.executable, program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("[")]
    return dict(map(json.loads, lines))


@pytest.mark.parametrize("case", sorted(tpu_runs.CASES))
def test_a_program_for_a_tpu_runs(outcomes, case):
    assert not outcomes[case], outcomes[case]
