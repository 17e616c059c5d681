"""The table of options: what is read from it, and that nothing is forgotten.

An option is a field of `CallOptions`, `TapOptions` or `Policy`, with its row. The
checks, the keys of programs, the texts of exported programs and the tests that choose
options read the fields. Two things are written by hand: the keyword in the signature of
each public function that takes it, for readers and type checkers, and its row in
docs/options.md. The tests here fail if one of them is forgotten.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path
from typing import Literal

import jax.numpy as jnp
import policies
import pytest

import hostcall as hc
from hostcall._api import tap as tap_module
from hostcall._core import option_checks, options
from hostcall._core.codec import Malformed
from hostcall._core.options import CallOptions, Option, Policy, TapOptions
from hostcall._engine.params.tap import TapParams
from hostcall._export import records
from hostcall._export.structures import CODEC

PAGE = (Path(__file__).parents[2] / "docs" / "options.md").read_text()
FACES = {
    "call": hc.call,
    "host": hc.host,
    "tap": hc.tap,
    "through": hc.tap_through,
    "print": hc.print,
    "feed": hc.feed,
}
TABLES = {
    "call": {k: v for k, v in options.CALL.items() if k not in options.POLICY},
    "host": {k: v for k, v in options.CALL.items() if k in options.POLICY},
    "tap": options.TAP,
    "feed": options.FEED,
}
X = jnp.arange(3.0)


def keywords(face):
    parameters = inspect.signature(FACES[face]).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


def page_rows(title):
    """The rows of the first table behind this line of the page, as lists of cells."""
    _, _, behind = PAGE.partition(title)
    found = []
    for line in behind.splitlines()[1:]:
        if line.startswith("|"):
            found.append([cell.strip() for cell in line.strip("|").split("|")])
        elif found:
            break
    return found[2:]


# (option, faces) -> (meaning, default).
ROWS = {
    (name, tuple(faces.split(", "))): (meaning, default)
    for names, faces, meaning, default in page_rows("and `feed` is `hc.feed`.")
    for name in re.findall(r"`(\w+)=`", names)
}


def values_on_page():
    found, name = {}, ""
    for first, value, _ in page_rows("## Values"):
        name = (re.findall(r"`(\w+)=`", first) or [name])[0]
        found.setdefault(name, set()).update(re.findall(r'"(\w+)"', value))
    return found


def missing_on_page(tables):
    """The options, and the values of options, that the page does not have."""
    named = {name for name, _ in ROWS}
    values = values_on_page()
    for table in tables:
        for name, row in table.items():
            if name not in named:
                yield f"{name}="
            for value in row.values:
                listed = value in values.get(name, ())
                if isinstance(value, str) and name in named and not listed:
                    yield f"{name}={value!r}"


def test_the_page_has_every_option_and_value():
    assert list(missing_on_page(TABLES.values())) == []


@pytest.mark.parametrize("face", FACES)
def test_the_page_says_which_function_takes_an_option(face):
    on_page = {name for name, faces in ROWS if face in faces}
    assert on_page == keywords(face).keys()


def test_the_page_says_the_defaults():
    for (name, faces), (_, default) in ROWS.items():
        for face in faces:
            value = keywords(face)[name]
            if isinstance(value, str) and name != "end":
                assert f'"{value}"' in default, (name, face)
            elif type(value) in (int, float) or (value is False and name != "flush"):
                assert str(value) in default, (name, face)


# Functions of the second table, and what each takes beside options: its subject.
OTHERS = {
    "`hc.feed`": (hc.feed, {"source"}),
    "`feed()`": (hc.typing.Feed.__call__, {"self"}),
    "`hc.Object`": (hc.Object, {"factory"}),
    "`hc.progress`": (hc.progress, {"step"}),
    "`hc.watch`": (hc.watch, {"x"}),
    "`hc.observe`": (hc.observe, set()),
    "`hc.Recorder`": (hc.Recorder, {"folder"}),
    "a recorder": (hc.Recorder.__call__, {"self"}),
}


def other_rows():
    """{function: {option: what the page says of its default}} of the second table."""
    found, function = {}, ""
    for first, names, _, default in page_rows("## Other functions"):
        function = first or function
        options = found.setdefault(function, {})
        options |= dict.fromkeys(re.findall(r"`(\w+)=`", names), default)
    return found


@pytest.mark.parametrize("name", OTHERS)
def test_the_page_has_all_options_of_other_functions(name):
    face, subject = OTHERS[name]
    parameters = inspect.signature(face).parameters.values()
    taken = {
        p.name: p.default
        for p in parameters
        if p.name not in subject and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    }
    on_page = other_rows()[name]
    if name == "`hc.feed`":  # the rest stands in the first table
        taken = {n: d for n, d in taken.items() if n not in keywords("feed")}
    assert on_page.keys() == taken.keys()
    for option, default in taken.items():
        if default is None or default is inspect.Parameter.empty or default == ():
            continue
        shown = f'"{default}"' if isinstance(default, str) else str(default)
        where_it_stands = on_page[option] or shown  # "as for hc.tap"
        assert shown in where_it_stands, option


@pytest.mark.parametrize("face", TABLES)
def test_every_option_of_the_table_is_taken(face):
    assert TABLES[face].keys() - keywords(face).keys() == set()


@pytest.mark.parametrize("fields", [CallOptions, TapOptions, Policy])
def test_functions_have_the_defaults_of_the_table(fields):
    faces = {
        CallOptions: ("host",),
        TapOptions: ("tap", "through", "print"),
        Policy: ("host",),
    }
    defaults = {f.name: f.default for f in dataclasses.fields(fields)}
    for face in faces[fields]:
        for name, default in keywords(face).items():
            if name in defaults:
                assert default == defaults[name], (face, name)


def test_every_value_fits_its_row():
    for table in (*TABLES.values(), options.CALL):
        for name, row in table.items():
            assert all(map(row.fits, policies.some(table)[name])), name
            assert not row.fits(object()), name


# --- One more option ------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Louder(TapOptions):
    volume: Literal["low", "high"] = options.option(
        options.choice("low", "high"), "low"
    )


LOUD_IN_ORDER = (
    {"volume": lambda value: value == "high"},
    {"order": lambda value: value == "ordered"},
    "Nobody can listen to that: leave out one of the two",
)


@pytest.fixture
def louder(monkeypatch):
    monkeypatch.setattr(TapParams, "takes", Louder)
    monkeypatch.setattr(tap_module, "TAP", options.table(Louder))
    pairs = (*option_checks._PAIRS, LOUD_IN_ORDER)
    monkeypatch.setattr(option_checks, "_PAIRS", pairs)


@hc.register("tests.options.listen")
def listen(x):
    pass


def made(**given):
    return tap_module.prepare(listen, (X,), {}, given)[1]


@pytest.mark.usefixtures("louder")
def test_a_new_option_is_checked():
    with pytest.raises(hc.errors.SpecError, match=r"volume= of the tap .* 'mid'"):
        made(volume="mid")
    with pytest.raises(hc.errors.SpecError, match="volume='high' and order='ordered'"):
        made(volume="high", order="ordered")
    assert made(volume="high").options.volume == "high"


@pytest.mark.usefixtures("louder")
def test_a_new_option_is_in_the_key():
    avals = [X.aval]
    low, high = made(), made(volume="high")
    assert low.key(avals) == made(volume="low").key(avals)
    assert low.key(avals) != high.key(avals)
    assert low != high


@pytest.mark.usefixtures("louder")
def test_a_new_option_leaves_the_process_and_is_checked_where_it_comes_in():
    record = records.record_of(made(volume="high"), [X.aval], exported=True)
    said = CODEC.encode(record, "a tap")
    assert said["options"]["volume"] == "high"

    def read(**changed):
        text = said | {"options": said["options"] | changed}
        return records.equation_of(CODEC.decode(text, records.CallRecord, "a tap"))

    assert read().options.volume == "high"
    for wrong in ({"volume": "mid"}, {"volume": 1}, {"order": "ordered"}):
        with pytest.raises(Malformed):
            read(**wrong)


def test_a_new_option_is_missed_on_the_page_and_in_the_signature():
    table = options.table(Louder)
    assert list(missing_on_page([table])) == ["volume="]
    assert table.keys() - keywords("tap").keys() == {"volume"}
    assert isinstance(table["volume"], Option)
    assert policies.some({"volume": table["volume"]}) == {"volume": ("low", "high")}


# --- Kinds of equations ---------------------------------------------------------------

PACKAGE = Path(hc.__file__).parent
KINDS = {p.stem for p in (PACKAGE / "_engine" / "params").glob("*.py")}
KINDS -= {"__init__", "equation"}
# These build equations, as users ask for them.
BUILDERS = ("_api", "_compat", "bridge", "buffers")


def test_a_kind_of_equation_is_one_file_of_params_and_one_folder_of_primitives():
    from test_layers import modules, own_imports

    for name, path in modules().items():
        for there in own_imports(path):
            kind = there.removeprefix("_engine.params.")
            if kind == there or kind not in KINDS:
                continue
            home = name.removeprefix("_primitives.").split(".")[0]
            of_a_kind = home in KINDS or name.startswith("_engine.params.")
            builds = name.split(".")[0] in BUILDERS
            assert of_a_kind or builds, f"{name} imports {there}"


def test_every_kind_has_primitives():
    for kind in KINDS:
        there = PACKAGE / "_primitives" / kind
        assert there.is_dir() or there.with_suffix(".py").exists(), kind


def test_kinds_are_found_by_the_name_of_their_file():
    for kind in sorted(KINDS):
        try:
            found = records.kind_of(kind)
        except Malformed:
            assert kind in ("buffer", "drop_in")  # they stay in the process
        else:
            assert found.__module__ == f"hostcall._engine.params.{kind}"
    for name in ("equation", "nothing", "../call", ""):
        with pytest.raises(Malformed):
            records.kind_of(name)


def test_executions_are_no_seconds():
    """`every=2` and `every=2.0` are other options, though the numbers are equal."""
    executions = options.TapOptions(every=2)
    assert executions == options.TapOptions(every=2)
    assert hash(executions) == hash(options.TapOptions(every=2))
    assert executions != options.TapOptions(every=2.0)
    assert executions != options.CallOptions()
