"""Every face compiles for H100s and TPUs, with the calls and collectives that it should.

XLA's compilers need the packages of these chips, and none of their hardware:
`make test-chips` installs them (900 MB). What runs there is another matter (docs/gpu.md).
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import chip_faces as faces
import pytest

NEEDED = {"cuda": "jax_plugins.xla_cuda12", "tpu": "libtpu"}
# (chip, devices, how the program is split over them)
TARGETS = [
    (chip, devices, form)
    for chip in NEEDED
    for devices, form in ((1, "jit"), (4, "jit"), (4, "shard_map"))
]
UNREGISTERED = "a target that nobody registered"
# Faces whose argument is whole in the call, so that its blocks are gathered. The feed
# has none, and single rows are picked with an all-reduce.
GATHERED = {*faces.FACES} - {"call no arguments", "feed", "call of bits", UNREGISTERED}
TAPS = {"tap", "tap ordered", "tap in a loop", "print"}


@pytest.fixture(scope="module", params=TARGETS, ids=lambda t: "-".join(map(str, t)))
def compiled(request):
    """(chip, form over several devices or None, what each face's program has)"""
    chip, devices, form = request.param
    try:
        found = importlib.util.find_spec(NEEDED[chip])
    except ImportError:
        found = None
    if found is None:
        pytest.skip(f"needs the package of {NEEDED[chip]} (make test-chips)")
    program = Path(__file__).with_name("chip_faces.py")
    done = subprocess.run(
        [sys.executable, program, chip, str(devices), form],
        capture_output=True,
        text=True,
        # What is compiled is looked at: it is that of users' programs.
        env={**os.environ, "JAX_DISABLE_MOST_OPTIMIZATIONS": "0"},
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("[")]
    return chip, form if devices > 1 else None, dict(map(json.loads, lines))


@pytest.mark.parametrize("face", sorted(faces.FACES.keys() - {UNREGISTERED}))
def test_a_face_is_compiled(compiled, face):
    chip, form, programs = compiled
    has = programs[face]
    if chip == "tpu" and face == "buffer_callback":
        assert "not supported on tpu" in has
        return
    if (chip, form) == ("tpu", "shard_map") and face in ("host gradient", "feed"):
        # As jax.pure_callback of results with different numbers of dimensions.
        assert "sharding doesn't match tensor rank" in has
        return
    assert isinstance(has, dict), has
    if chip == "tpu":
        assert has["send"] >= 1
        # Else a barrier would wait for the send alone, and not for the function.
        assert has["recv"] >= 1
    else:
        target = "hostcall_tap" if face in TAPS else "hostcall_call"
        target = "hostcall_buffer" if face == "buffer_callback" else target
        ours = {name: n for name, n in has.items() if name.startswith("hostcall")}
        assert ours == {target: 2 if face == "host gradient" else 1}
    if form == "jit" and face in GATHERED:
        assert has["all-gather"] >= 1
    if form != "jit":  # one device, or each on its own block
        assert "all-gather" not in has
        assert "all-reduce" not in has


def test_a_handler_is_looked_up_when_a_program_is_compiled(compiled):
    """So the others show that ours are registered."""
    _, _, programs = compiled
    assert "nobody" in programs[UNREGISTERED]
    assert "Error" in programs[UNREGISTERED]
