"""The public names, with signatures and sections, are those of api.txt."""

from __future__ import annotations

import inspect
import operator
import re

import public
import pytest

import hostcall as hc
import hostcall.host_callback


def test_the_snapshot_is_current():
    """Sorted out by set first, so that a failure shows the changed lines alone."""
    want, got = public.SNAPSHOT.read_text().splitlines(), public.lines()
    assert sorted({*got} - {*want}) == sorted({*want} - {*got}), (
        "public names changed: name them in CHANGELOG.md, then type: make api"
    )
    assert got == want, "type: make api"


@pytest.mark.parametrize(
    ("before", "after", "names"),
    [
        ("hostcall.call(fn)", "hostcall.call(fn, on)", ["hostcall.call"]),
        ("class hostcall.typing.Feed(object)", "", ["hostcall.typing.Feed"]),
        ("", "hostcall.typing.Feed.__call__(self)", ["hostcall.typing.Feed.__call__"]),
        ("", "code hc-feed", ["hc-feed"]),
        ("", "hostcall.tap(fn)  [Args]", []),
        ("code hc-escape", "", []),
    ],
)
def test_a_change_has_to_stand_in_the_changelog(before, after, names):
    changelog = (
        "# Changes\n\n## Unreleased\n\n- `hc.tap`, hc-escape.\n\n## 0.1.0\n\n- hc.call"
    )
    assert public.untold([before], [after], changelog) == names


# What a program calls, but for functions that make or configure something.
FACES = (
    *(
        "call",
        "tap",
        "tap_through",
        "print",
        "host",
        "feed",
        "progress.__call__",
        "watch",
    ),
    *("pure_callback", "io_callback", "buffers.buffer_callback", "debug.callback"),
    *("debug.print", "derivatives.tap_tangent", "derivatives.tap_cotangent"),
    *("host_callback.call", "host_callback.id_tap", "host_callback.id_print"),
)


@pytest.mark.parametrize("face", FACES)
def test_faces_tell_their_behaviour_and_cost(face):
    text = inspect.getdoc(operator.attrgetter(face)(hc))
    for section in ("Under transformations", "Cost"):
        assert re.search(rf"^{section}:", text, re.M), section
