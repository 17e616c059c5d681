"""The table of decisions: which devices of a program make a call, and who is told.

The programs are descriptions, as `_jax.program_of` makes them of JAX's contexts: one
process can't be several, and a table of them is read faster than a job's programs. The
tests of jobs, meshes and exports run programs with the same rows.
"""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import hostcall as hc
from hostcall import _native
from hostcall._engine.placement import Placement, Reach, Team
from hostcall._engine.placing import hosted, placed
from hostcall._native import Inside

MESH = object()
JOB = object()


def device(number, process=0):
    return SimpleNamespace(
        platform="cpu", id=number, process_index=process, client=None
    )


HERE = [device(0), device(1)]
THERE = [device(2, 1), device(3, 1)]


def program(devices=None, *, mesh=None, size=None, across=False, platforms=("cpu",)):
    """What is known of a program; `devices` are None for one, () for unknown ones."""
    known = bool(devices)
    if size is None:
        size = len(devices) if known else 1
    return SimpleNamespace(
        devices=devices if devices is None else tuple(devices),
        local=[d for d in devices if d.process_index == 0] if known else None,
        by_ordinal={d.id: d for d in HERE},
        mesh=mesh,
        size=size,
        across=across,
        platforms=platforms,
        client=None,
    )


def call(*, results=1, fail=None, devices=(), on_buffers=False, **more):
    """What a call says that the decision asks for."""
    options = SimpleNamespace(fail=fail, arrays=more.pop("arrays", "numpy"))
    return SimpleNamespace(
        avals=(None,) * results,
        options=options,
        devices=devices,
        on_buffers=on_buffers,
        **more,
    )


ALL = [*HERE, *THERE]
TOGETHER = {"fail": "together"}

# (program, call, leader, what the placement says beside devices and job)
ROWS = {
    "one device": (program(), call(), None, {}),
    "one device, whose mesh has one": (program(mesh=MESH), call(), None, {}),
    "several, unknown": (
        program((), size=4),
        call(),
        None,
        {"team": Team("ONCE", 4, None)},
    ),
    "several, unknown, in a mesh": (
        program((), size=4, mesh=MESH),
        call(),
        None,
        {"team": Team("EACH", 4, None)},
    ),
    "several, in a mesh": (
        program(HERE, mesh=MESH),
        call(),
        None,
        {"team": Team("EACH", 2, None)},
    ),
    "several": (program(HERE), call(), None, {"team": Team("ONCE", 2, 0)}),
    "several, and a leader": (
        program(HERE),
        call(),
        HERE[1],
        {"team": Team("ONCE", 2, 1)},
    ),
    "over processes, the leader here": (
        program(ALL, across=True),
        call(),
        HERE[1],
        {"team": Team("ONCE", 2, 1), "reach": Reach(4, 1), "calling_process": 0},
    ),
    "over processes, the leader elsewhere": (
        program(ALL, across=True),
        call(),
        THERE[0],
        {
            "team": Team("ONCE", 2, 0),
            "reach": Reach(4, 2),
            "calling_process": 1,
            "called_by_other_process": True,
        },
    ),
    "over processes, without results": (
        program(ALL, across=True),
        call(results=0),
        THERE[1],
        {"team": Team("ONCE", 2, 0), "called_by_other_process": True},
    ),
    "over processes, without results, together": (
        program(ALL, across=True),
        call(results=0, **TOGETHER),
        HERE[0],
        {"team": Team("ONCE", 2, 0), "reach": Reach(4, 0), "calling_process": 0},
    ),
    "over processes, in a mesh": (
        program(ALL, across=True, mesh=MESH),
        call(),
        None,
        {"team": Team("EACH", 2, None)},
    ),
    "over processes, in a mesh, together": (
        program(ALL, across=True, mesh=MESH),
        call(**TOGETHER),
        None,
        {"team": Team("EACH", 2, None), "reach": Reach(4), "origins": (0, 0, 1, 1)},
    ),
    "together, in one process": (
        program(HERE, mesh=MESH),
        call(**TOGETHER),
        None,
        {"team": Team("EACH", 2, None)},
    ),
    "over processes, in place on GPUs": (
        program(ALL, across=True, platforms=("cuda",)),
        call(on_buffers=True, **TOGETHER),
        HERE[0],
        {
            "team": Team("ONCE", 2, 0),
            "reach": Reach(4, 0, returns_outcome=False),
            "calling_process": 0,
        },
    ),
    "over processes, in place on GPUs, in a mesh": (
        program(ALL, across=True, mesh=MESH, platforms=("cuda",)),
        call(on_buffers=True, **TOGETHER),
        None,
        {"team": Team("EACH", 2, None)},
    ),
    "a sharded feed": (program(HERE), call(devices=(0, 1)), None, {}),
}


@pytest.mark.parametrize("row", ROWS)
def test_each_row_of_the_table(row):
    of, equation, leader, said = ROWS[row]
    got = placed(of, equation, leader, JOB)
    assert got == Placement(
        devices=of.by_ordinal,
        mesh=of.mesh,
        program_devices=of.devices,
        job=JOB,
        **said,
    )
    reach = said.get("reach")
    assert got.returns_outcome == (reach is not None and reach.returns_outcome)


def test_of_unknown_devices_nothing_says_how_many_are_in_one_of_several_processes(
    monkeypatch,
):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    unknown = program((), size=4, across=True)
    assert placed(unknown, call(), None, JOB).team is None
    together = placed(unknown, call(**TOGETHER), None, JOB)
    assert together.team is None
    assert together.reach == Reach(4)
    assert together.origins == ()


# (of the call, platforms, inside)
INSIDE = {
    "pure": ({"runs_where_dispatched": False}, ("cpu",), Inside.ASKED),
    "ordered": ({"runs_where_dispatched": True}, ("cpu",), Inside.XLAS_THREADS),
    "uncommitted arrays": (
        {"runs_where_dispatched": True, "arrays": "free"},
        ("cpu",),
        Inside.EVERYWHERE,
    ),
    "JAX's own": (
        {"runs_where_dispatched": True, "is_jaxs_own": True},
        ("cpu",),
        Inside.EVERYWHERE,
    ),
    "a tap": ({"ignores_results": True}, ("cpu",), Inside.NEVER),
    "on a GPU": ({"runs_where_dispatched": True}, ("cuda",), Inside.NEVER),
    "on either": ({"runs_where_dispatched": True}, ("cpu", "cuda"), Inside.NEVER),
}


@pytest.mark.parametrize("row", INSIDE)
def test_which_calls_run_inside_one_of_xlas_host_callbacks(row):
    said, platforms, inside = INSIDE[row]
    rest = {
        "ignores_results": False,
        "is_jaxs_own": False,
        "runs_where_dispatched": False,
    }
    equation = call(**{**rest, **said})
    made = hosted(Placement(devices={}), equation, None, platforms)
    assert made.inside is inside
    assert made.packed
    assert made.host_device.platform == "cpu"
    own = equation.is_jaxs_own
    assert (made.host_device in jax.local_devices(backend="cpu")) == own


# --- The same through programs --------------------------------------------------------


def placements(f, *args):
    """The placements that calls of a program run with."""
    seen = []

    def note(x):
        hooks, *_ = _native.current()
        seen.append(hooks.placement)
        return x

    jax.block_until_ready(jax.jit(f(note))(*args))
    return seen


def teams(seen):
    return {placement.team for placement in seen}


X = jnp.arange(4.0)


def test_a_program_on_one_device():
    seen = placements(lambda note: lambda x: hc.call(note, x, x), X)
    assert teams(seen) == {None}
    assert seen[0].program_devices is None


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
def test_programs_over_several_devices():
    devices = jax.devices()[:2]
    mesh = Mesh(np.array(devices), ("i",))
    x = jax.device_put(X, NamedSharding(mesh, P("i")))
    whole = placements(lambda note: lambda x: hc.call(note, x, x), x)
    assert teams(whole) == {Team("ONCE", 2, 0)}
    assert whole[0].program_devices == tuple(devices)

    def mapped(note):
        def part(x):
            return hc.call(note, x, x)

        return jax.shard_map(part, mesh=mesh, in_specs=P("i"), out_specs=P("i"))

    each = placements(mapped, x)
    assert teams(each) == {Team("EACH", 2, None)}
    assert len(each) == 2


SEEN = []


@hc.register("placement.noted", version=1)
def noted(x):
    hooks, *_ = _native.current()
    SEEN.append(hooks.placement)
    return np.sin(x)


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
def test_a_program_that_was_exported_and_loaded_names_no_leader():
    """Its devices are not known when it is written, nor which will be the first."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("i",))
    x = jax.device_put(X, NamedSharding(mesh, P("i")))
    jitted = jax.jit(lambda x: hc.call(noted, x, x), in_shardings=x.sharding)
    exported = hc.export(jitted)(x)
    loaded = jax.jit(hc.load(exported.serialize()).call)
    SEEN.clear()
    assert np.allclose(loaded(x), np.sin(X))
    (seen,) = SEEN
    assert seen.team == Team("ONCE", 2, None)
    assert seen.program_devices == ()
    assert seen.text
