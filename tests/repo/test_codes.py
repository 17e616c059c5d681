"""Codes of errors: each has a section in one page, and each message one code line."""

from __future__ import annotations

import ast
import copy
import functools
import inspect
import pickle
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hostcall as hc
from hostcall.__main__ import main
from hostcall._cli import explain
from hostcall._core import errors, failures

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "hostcall"
PAGES = sorted((PACKAGE / "explain").glob("*.md"))
SECTIONS = explain.sections()
MODULES = [name for name in hc.__all__ if inspect.ismodule(getattr(hc, name))]
KINDS = {
    name: getattr(hc.errors, name)
    for name in hc.errors.__all__
    if name.endswith("Error")
}


@functools.cache  # and not when the tests are collected, which each worker does
def raised() -> list[tuple[str, str, str | None]]:
    """(place, class, code) of each error that is made in the package."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            name = ast.unparse(node.func).split(".")[-1]
            if name not in KINDS:
                continue
            given = [k.value for k in node.keywords if k.arg == "code"]
            code = ast.unparse(given[0]).strip("'") if given else None
            found.append((f"{path.name}:{node.lineno}", name, code))
    return found


# A failure that goes through JAX's own callback has the code of the error inside.
VARIABLE = "code"


def test_each_error_has_a_code_with_a_section():
    assert len(raised()) > 150  # so many places were found
    for place, name, code in raised():
        if code != VARIABLE:
            assert (code or KINDS[name].code) in SECTIONS, place


def test_an_error_of_the_base_class_names_its_code():
    """Its default is for errors that stand for others; the rest say what happened."""
    assert [
        place
        for place, name, code in raised()
        if (name, code) == ("HostcallError", None)
    ] == []


def test_each_section_has_errors():
    used = {code or KINDS[name].code for _, name, code in raised()}
    assert set(SECTIONS) - used == set()


def test_codes_of_native_texts_have_sections():
    texts = [path.read_text() for path in (ROOT / "native").rglob("*.*")]
    given = re.findall(r'HOSTCALL_CODE\(\s*"([^"]+)"\)', "".join(texts))
    assert len(given) > 15
    assert set(given) <= set(SECTIONS)


def test_there_are_few_pages_and_a_code_stands_in_one():
    """A page is a kind of mistake."""
    assert len(PAGES) <= 15
    headings = [
        heading
        for page in PAGES
        for heading in re.findall(r"^## (.*)$", page.read_text(), re.M)
    ]
    assert sorted(headings) == list(SECTIONS)


@pytest.mark.parametrize("code", SECTIONS)
def test_a_section_has_its_parts(code):
    section = SECTIONS[code]
    assert re.match(rf"## {code}\n\n[^\n]+\.\n\n\*\*What happened\.\*\* ", section)
    assert 15 <= len(section.splitlines()) <= 52
    cause, cure = section.index("**Cause.**"), section.index("**Cure.**")
    assert cause < cure < section.index("```python")
    assert f'.code == "{code}"' in section
    assert section.rstrip().endswith("```")
    assert max(map(len, section.splitlines())) <= 100


def test_other_pages_are_named_by_their_titles():
    """An installed package has no folder docs."""
    titles = {
        page.read_text().partition("\n")[0].removeprefix("# ")
        for page in (ROOT / "docs").rglob("*.md")
    }
    modules = [hc, *(getattr(hc, name) for name in MODULES)]
    faces = [(m, vars(m).get(n)) for m in modules for n in getattr(m, "__all__", ())]
    texts = [inspect.getdoc(thing) or "" for pair in faces for thing in pair]
    named = 0
    for text in [*SECTIONS.values(), *texts]:
        assert "docs/" not in text
        for title in re.findall(r'[Tt]he pages? "([^"]+)"', " ".join(text.split())):
            assert title in titles
            named += 1
    assert named > 10


def test_the_overview_has_all_codes():
    text = (ROOT / "docs" / "errors.md").read_text()
    table = dict(
        re.findall(r"^\| \[`(hc-[^`]+)`\]\(errors/\w+\.md#\1\) \| (.*?) \|", text, re.M)
    )
    assert table == {code: explain.meaning(text) for code, text in SECTIONS.items()}
    assert list(table) == sorted(table)
    for page in PAGES:
        for code in re.findall(r"^## (.*)$", page.read_text(), re.M):
            assert f"(errors/{page.name}#{code})" in text


# --- Messages -------------------------------------------------------------------------


def made(name: str, **code: str) -> hc.errors.HostcallError:
    if name == "WatchError":
        values = {"x": np.ones(2)}
        device = jax.devices()[0]
        return hc.errors.WatchError("hostcall: no", values=values, device=device)
    return KINDS[name]("hostcall: no", **code)


@pytest.mark.parametrize("name", KINDS)
def test_a_message_ends_with_its_code(name):
    error = made(name)
    line = f"[{error.code}] python -m hostcall explain {error.code}"
    assert str(error) == f"hostcall: no\n{line}"
    assert error.args == ("hostcall: no",)


@pytest.mark.parametrize("name", KINDS)
def test_copies_and_pickles_are_equal(name):
    code = {} if name == "WatchError" else {"code": "hc-traced"}
    error = made(name, **code)
    error.add_note("a note")
    for again in (
        copy.copy(error),
        copy.deepcopy(error),
        *(pickle.loads(pickle.dumps(error, n)) for n in range(2, 6)),
    ):
        assert type(again) is type(error)
        assert (str(again), again.args, again.code) == (
            str(error),
            error.args,
            error.code,
        )
        assert again.__notes__ == ["a note"]
        assert isinstance(again, KINDS[name].__mro__[2])


def test_a_watch_error_keeps_its_values():
    again = pickle.loads(pickle.dumps(made("WatchError")))
    assert again.values["x"].tolist() == [1, 1]
    assert again.device == str(jax.devices()[0])


def test_a_class_of_a_user_has_the_code_of_its_base():
    class Mine(hc.errors.SpecError):
        pass

    assert str(Mine("no")) == "no\n[hc-spec] python -m hostcall explain hc-spec"
    assert str(Mine()) == "[hc-spec] python -m hostcall explain hc-spec"
    assert Mine("no", code="hc-option").code == "hc-option"
    assert Mine.code == "hc-spec"


def test_a_quoted_message_keeps_its_own_code_to_itself():
    inner = hc.errors.ResultError("hostcall: result is None")
    outer = hc.errors.FeedError(f"hostcall: the source failed ({inner}). Mend it")
    assert str(outer) == (
        "hostcall: the source failed (hostcall: result is None). Mend it"
        "\n[hc-feed] python -m hostcall explain hc-feed"
    )


def test_the_code_comes_after_the_number_of_the_failure():
    error = hc.errors.ResultError("hostcall: no")
    text = failures.text_for_xla(error, "f", "train.py:3", (2,))
    assert re.fullmatch(
        r"ResultError: hostcall: no \(in callback `f`, row 2, called at train.py:3\)"
        r" \[hostcall error \d+\]\n\[hc-result\] python -m hostcall explain hc-result",
        text,
    )
    assert failures.without_number(text).endswith("called at train.py:3)")
    assert errors.code_in(text) == "hc-result"
    other = failures.text_for_xla(ValueError("no"), "f", "train.py:3", ())
    assert errors.code_in(other) is None


def test_jax_reports_a_failed_program_with_the_code():
    f = jax.jit(lambda x: hc.call(lambda v: None, x, x))
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        f(jnp.float32(1)).block_until_ready()
    text = str(caught.value)
    assert text.count("python -m hostcall explain") == 1
    assert errors.code_in(text) == "hc-result"
    assert isinstance(hc.errors.last_error(), hc.errors.ResultError)


# --- The command ----------------------------------------------------------------------


def test_the_command_prints_a_section(capsys):
    for given in ("hc-escape", "escape", "[hc-escape]", "HC-ESCAPE"):
        assert main(["explain", given]) == 0
        assert capsys.readouterr().out == SECTIONS["hc-escape"]


def test_a_terminal_gets_the_section_rendered(capsys, monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(["explain", "hc-escape"]) == 0
    out = capsys.readouterr().out
    assert "hc-escape" in out
    assert "What happened." in out
    assert not any(mark in out for mark in ("**", "```", "# hc-"))


def test_a_terminal_without_rich_gets_the_section_as_it_is(capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setitem(sys.modules, "rich", None)
    assert main(["explain", "hc-escape"]) == 0
    assert capsys.readouterr().out == SECTIONS["hc-escape"]


def test_the_command_lists_the_codes(capsys):
    assert main(["explain"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == sorted(SECTIONS)
    meaning = explain.meaning(SECTIONS["hc-escape"])
    assert f"hc-escape        {meaning}" in lines


def test_the_command_names_the_nearest_codes(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["explain", "hc-escpe"])
    out, err = capsys.readouterr()
    assert out == ""
    assert "there is no code 'hc-escpe'. The nearest are hc-escape" in err
    with pytest.raises(SystemExit, match="2"):
        main(["explain", "quite-another"])  # of three letters, any is near hc-jax
    assert "The nearest" not in capsys.readouterr().err


def test_the_command_of_a_message_works():
    error = hc.errors.EscapeError("hostcall: no")
    command = str(error).splitlines()[-1].partition("] python ")[2]
    done = subprocess.run(
        [sys.executable, *command.split()], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == SECTIONS["hc-escape"]
