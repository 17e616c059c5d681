"""Every face under every transformation, order and dtype, against plain Python.

table.py has the outcome of each cell: "ok" if its values, and what host code has seen,
are those of the oracle; else a hole, whose error this file expects.
"""

from __future__ import annotations

from contextlib import ExitStack
from itertools import cycle

import jax
import numpy as np
import page
import pytest
from dtypes import DTYPES, WIDE, values
from faces import COLUMNS, FACES, Host, Move, Square, plain_of
from programs import MOVES, TRANSFORMATIONS, has_devices_for
from table import KEY, of_both, of_transformation

import hostcall as hc


def bits(v):
    """A value with its dtype, so that equal ones compare equal, NaNs too."""
    if isinstance(v, str):
        return v
    if is_key(v):
        return str(v.dtype), bits(jax.random.key_data(v))
    v = np.asarray(v)
    if v.dtype.name in ("int2", "int4"):  # the unused bits of their bytes may differ
        return v.dtype.name, bits(v.astype(np.int8))
    return v.dtype.name, v.shape, v.tobytes()


def in_order(sights, parallel):
    """Devices that call at the same time have no order."""
    sights = [bits(v) for v in sights]
    return sorted(sights) if parallel else sights


def outcome(face, order, transformation, work, portable=False):
    """ "ok"; "again" if host code saw all values twice; "numbers" if it saw those of
    keys; or the error.
    """
    with ExitStack() as exits:
        host = Host(exits, transformation.spec, work, portable)
        oracle = Host(exits, transformation.spec, work)
        want = transformation.oracle(plain_of(face, oracle))
        try:
            op = FACES[face][1](host, order)
            got = jax.block_until_ready(transformation.program(op))
            seen = in_order(host.events(), transformation.parallel)
            want_seen = in_order(oracle.seen, transformation.parallel)
            assert want_seen
            check(got, want, transformation.parallel)
            if seen == 2 * want_seen:
                return "again"
            if is_key(host.spec) and seen != want_seen:
                assert seen == numbers(face, transformation, host)
                return "numbers"
            assert seen == want_seen
        except hc.errors.HostcallError as error:
            return f"{error.code}: {error}"
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "ok"


def is_key(v):
    return jax.dtypes.issubdtype(v.dtype, jax.dtypes.prng_key)


def numbers(face, transformation, host):
    """What host code sees of keys if they come as their numbers."""
    raw = Host(host.exits, host.spec, Move)
    plain = plain_of(face, raw)
    transformation.oracle(lambda keys: plain(np.asarray(jax.random.key_data(keys))))
    return in_order(raw.seen, transformation.parallel)


def check(got, want, parallel):
    got, want = jax.tree.leaves(got), jax.tree.leaves(want)
    if parallel and len(want) > 1:  # the rows of MOVES
        assert in_order(got, parallel) == in_order(want, parallel)
        return
    for a, b in zip(got, want, strict=True):
        if parallel:
            a, b = np.sort(a), np.sort(b)
        if bits(a) != bits(b):  # derivatives
            a, b = np.asarray(a), np.asarray(b)
            assert (a.dtype, a.shape) == (np.dtype(np.float32), b.shape)
            np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of jax.pmap
@pytest.mark.parametrize(("face", "order"), COLUMNS)
def test_transformations(face, order):
    pytest.importorskip("flatbuffers")  # for export
    wrong = {}
    for name, transformation in TRANSFORMATIONS.items():
        if not has_devices_for(name):
            continue
        got = outcome(face, order, transformation, Square, portable=name == "export")
        if not got.startswith(of_transformation(face, order, name).starts):
            wrong[name] = got
    assert wrong == {}


def array(dtype, shape):
    if dtype == KEY:
        return jax.random.split(jax.random.key(7), shape)
    return values(dtype, shape, 9)


@pytest.mark.parametrize("wide", [False, True], ids=["", "x64"])
@pytest.mark.parametrize(("face", "order"), COLUMNS)
def test_dtypes(face, order, wide, request):
    """All dtypes with each face, with its orders, transformations and shapes in turn."""
    if wide:
        request.getfixturevalue("x64")
    names = [*filter(has_devices_for, MOVES)]
    shapes, wrong = cycle([(7,), (), (3, 5), (2,)]), {}
    # The orders of a face share the dtypes: with which of them a dtype comes shows nothing
    # more of the bytes. The next face begins with another order and transformation, so
    # that each dtype meets all of those.
    orders, begin = FACES[face][0], list(FACES).index(face)
    turn = orders.index(order) + begin
    dtypes = WIDE if wide else [d for d in (*DTYPES, KEY) if d not in WIDE]
    for number, dtype in enumerate(dtypes):
        if (number - turn) % len(orders):
            continue
        name = names[(begin + number) % len(names)]
        x = array(dtype, next(shapes))
        got = outcome(face, order, MOVES[name](x), Move)
        if not got.startswith(of_both(face, order, name, dtype).starts):
            wrong[dtype, name] = got
    assert wrong == {}


def test_the_page_shows_the_table():
    assert page.PAGE.read_text() == page.text(), "type: make matrix"
