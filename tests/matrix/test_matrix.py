"""Every face under every transformation, order and dtype, against plain Python.

table.py has the outcome of each cell: "ok" if its values, and what host code has seen,
are those of the oracle; else a hole, whose error this file expects. test_smoke.py has the
cells of SETTINGS with the first order of each face.
"""

from __future__ import annotations

from itertools import cycle

import jax
import page
import pytest
from cells import outcome
from dtypes import DTYPES, WIDE, values
from faces import COLUMNS, FACES, Move, Square
from programs import MOVES, SETTINGS, TRANSFORMATIONS, has_devices_for
from table import KEY, of_both, of_transformation


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of jax.pmap
@pytest.mark.parametrize(("face", "order"), COLUMNS)
def test_transformations(face, order):
    pytest.importorskip("flatbuffers")  # for export
    wrong = {}
    first = order == FACES[face][0][0]
    for name, transformation in TRANSFORMATIONS.items():
        if not has_devices_for(name) or (first and name in SETTINGS):
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
