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


def public_things():
    """Each public name, method and submodule of `hc`, with what it is."""
    queue, seen = [("hostcall", hc), ("host_callback", hostcall.host_callback)], set()
    while queue:
        full, thing = queue.pop()
        is_module = inspect.ismodule(thing)
        owned = is_module or getattr(thing, "__module__", "").startswith("hostcall")
        if id(thing) in seen or not owned:
            continue
        seen.add(id(thing))
        yield full, thing
        if is_module:
            names = public._names(thing)
        elif inspect.isclass(thing) or full == "hostcall.progress":
            names = [n for n in dir(thing) if n[0] != "_"]
        else:
            names = []
        queue += [
            (f"{full}.{name}", value)
            for name in names
            if not inspect.ismodule(value := getattr(thing, name))
            or value.__name__.startswith("hostcall")
        ]


def test_signatures_show_no_private_values():
    """As `help` shows them: no `<object object at ...>`, no class of a private module."""
    seen, private = 0, re.compile(r"<[^>]*>|\b0x|\b_\w|hostcall\._")
    for full, thing in public_things():
        if not callable(thing):
            continue
        try:
            shown = str(inspect.signature(thing))
        except ValueError:  # of the engine
            continue
        seen += 1
        assert not private.search(shown), f"{full}{shown}"
    assert seen > 100


@pytest.mark.parametrize("module", ["", "tools", "bridge", "results", "typing"])
def test_completion_offers_the_public_names(module):
    thing = operator.attrgetter(module)(hc) if module else hc
    offered = {name for name in dir(thing) if name[0] != "_"}
    own = {"print"} if thing is hc else set()
    assert offered == {*thing.__all__, *own}
    assert not offered & {"Any", "TYPE_CHECKING", "importlib"}


def test_help_of_the_bar_is_that_of_its_call():
    assert inspect.getdoc(hc.progress) == inspect.getdoc(hc.progress.__call__)


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
