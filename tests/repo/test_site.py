"""The site builds without a warning, and shows every public name once."""

from __future__ import annotations

import builtins
import html
import importlib
import importlib.util
import inspect
import re
import typing
from pathlib import Path

import pytest

import hostcall as hc

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
MODULES = [
    *("bridge", "buffers", "debug", "derivatives", "errors"),
    *("monitor", "results", "testing", "tools", "typing"),
]


def test_every_page_is_there(site):
    for page in DOCS.rglob("*.md"):
        built = (site / page.relative_to(DOCS)).with_suffix(".html")
        assert "<h1>" in built.read_text(), page


def test_pages_of_the_design_are_below_the_page_for_contributors(site):
    """Not among those for users, which the front page lists for every page's side."""
    listed = re.findall(
        r"```{toctree}\n(.*?)```", (DOCS / "index.md").read_text(), re.S
    )
    assert len(listed) > 5
    assert not [tree for tree in listed if "design/" in tree]
    assert "\ncontributing\n" in listed[-1]
    assert 'href="design/index.html"' in (site / "contributing.html").read_text()


def test_the_front_page_has_readmes_program_and_table(site):
    front = (site / "index.html").read_text()
    assert "bessel_sum" in front
    assert "a scalar call in a compiled loop" in front
    assert "pictures/" not in front or "_images/" in front


def test_a_program_of_a_page_is_a_cell(site):
    """Its source stands in a cell of a notebook, which `make docs` runs."""
    assert 'class="cell docutils container"' in (site / "feeding.html").read_text()


def test_a_downloaded_notebook_runs(site, tmp_path):
    """One of them; its first cell says what to install."""
    nbclient, nbformat = (pytest.importorskip(p) for p in ("nbclient", "nbformat"))
    (path,) = (site / "_downloads").glob("*/plot_hudson_bay.ipynb")
    notebook = nbformat.read(path, 4)
    assert "pip install matplotlib scipy" in notebook.cells[0].source
    where = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=600, resources=where).execute()


def head(page):
    """What the head of a page says: {name: text} of its meta tags, and its links."""
    text = page.read_text().partition("</head>")[0]
    said = re.findall(r'<meta (?:name|property)="([^"]+)" content="([^"]*)"', text)
    said += re.findall(r'<link rel="(canonical|shortcut icon)" href="([^"]*)"', text)
    return {name: html.unescape(value) for name, value in said}


def test_a_page_says_what_it_is(site):
    """To search engines, to previews of links, and on the tab."""
    for page in DOCS.rglob("*.md"):
        place = page.relative_to(DOCS).with_suffix(".html")
        said = head(site / place)
        assert 20 < len(said["description"]) <= 210, page
        assert said["og:description"] == said["description"], page
        assert said["og:title"], page
        assert said["og:url"] == said["canonical"], page
        assert said["canonical"].endswith(str(place)), page
        assert (site / place).parent.joinpath(said["shortcut icon"]).exists(), page
    assert head(site / "index.html")["description"].startswith(
        "Call any Python function"
    )
    assert (
        f"<title>hostcall {hc.__version__}</title>" in (site / "index.html").read_text()
    )


def test_the_map_of_the_site_has_its_pages(site):
    places = re.findall("<loc>(.*?)</loc>", (site / "sitemap.xml").read_text())
    base = head(site / "index.html")["canonical"].removesuffix("index.html")
    pages = {
        f"{base}{page.relative_to(DOCS).with_suffix('.html')}"
        for page in DOCS.rglob("*.md")
    }
    assert pages - set(places) == set()
    assert all((site / place.removeprefix(base)).exists() for place in places)


@pytest.fixture(scope="module")
def moved():
    """docs/_ext/moved.py"""
    spec = importlib.util.spec_from_file_location("moved", DOCS / "_ext" / "moved.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_an_old_address_leads_to_where_its_text_is(site, moved):
    """To a page, and to a section of it, that are there."""
    assert len(moved.MOVED) > 50
    for old in moved.MOVED:
        page, section = moved.address(old)
        sections = {"": section, **moved.RENAMED.get(old, {})}
        there = re.findall(r'id="([^"]+)"', (site / f"{page}.html").read_text())
        assert {*sections.values()} - {"", *there} == set(), old
        assert not (DOCS / f"{old}.md").exists(), old
        sent = (site / f"{old}.html").read_text()
        (place,) = re.findall(r'http-equiv="refresh" content="0; url=([^"#]+)', sent)
        assert (site / old).parent.joinpath(place).resolve() == site / f"{page}.html"


def test_an_old_address_of_a_code_leads_to_its_section(moved):
    codes = [old.partition("/")[2] for old in moved.MOVED if "/hc-" in old]
    assert len(codes) > 30
    for code in codes:
        page, section = moved.address(f"errors/{code}")
        assert section == code
        assert f"\n## {code}\n" in (DOCS / f"{page}.md").read_text()


def test_a_page_links_to_its_source(site):
    def edits(page):
        return re.findall(r'href="([^"]+)" rel="edit"', (site / page).read_text())

    for page in ("calling", "errors/results", "reference/errors"):
        (link,) = edits(f"{page}.html")
        assert link.endswith(f"/edit/main/docs/{page}.md")
    assert edits("reference/hostcall.call.html") == []  # written by the build
    assert edits("gallery/plot_orbit.html") == []
    assert ">Repository</a>" in re.sub(r"\s+", "", (site / "index.html").read_text())


def test_pictures_have_an_alternative_text(site):
    for page in site.rglob("*.html"):
        for picture in re.findall(r"<img\b[^>]*>", page.read_text()):
            assert re.search(r'alt="[^"]+"', picture), (page, picture)


def test_nothing_comes_from_another_host(site):
    """No script, style, font or picture, so that a page is whole without a network."""
    fetched = re.compile(
        r"""<(?:script|img|iframe|source)\b[^>]*\ssrc=["']?(?:https?:)?//[^>]*"""
        r"""|<link\b[^>]*(?:stylesheet|icon|preload)[^>]*href=["']?(?:https?:)?//[^>]*"""
        r"""|<link\b[^>]*href=["']?(?:https?:)?//[^>]*(?:stylesheet|icon|preload)[^>]*"""
        r"""|(?:import|from)\s*\(?["'](?:https?:)?//[^"']*"""
        r"""|(?:@import|url\()\s*["']?(?:https?:)?//[^)]*"""
    )
    for page in [*site.rglob("*.html"), *site.rglob("*.css")]:
        assert fetched.findall(page.read_text()) == [], page
    assert "mermaid.esm.min.mjs" in (site / "design" / "taps.html").read_text()


def test_every_public_name_stands_in_the_reference_once(site):
    shown = []
    for page in (site / "reference").glob("*.html"):
        ids = re.findall(
            r'<dt class="sig sig-object py" id="([^"]+)"', page.read_text()
        )
        shown += [name for name in ids if name.count(".") == 1 or _is_public(name)]
    names = [f"hostcall.{name}" for name in dir(hc) if _is_shown(hc, name)]
    for module in map(hc.__getattr__, MODULES):
        names += [
            f"{module.__name__}.{n}" for n in module.__all__ if _is_shown(module, n)
        ]
    elsewhere = {"hostcall.errors.HostcallError", "hostcall.buffers.ExecutionStage"}
    missing = set(names) - set(shown) - elsewhere
    assert missing == set()
    assert sorted(shown) == sorted(set(shown))


def _is_public(name):
    """Whether it is a name of a module, not of a class."""
    module, _, attribute = name.rpartition(".")
    try:
        return hasattr(importlib.import_module(module), attribute)
    except ImportError:
        return False


def _is_shown(module, name):
    return name[0] != "_" and not inspect.ismodule(getattr(module, name))


# --- What the reference says, as a reader sees it ---------------------------------------

# Names of JAX, NumPy and Python in signatures; builtins and typing are known.
ELSEWHERE = {
    *("Array", "ArrayLike", "Device", "DisabledSafetyCheck", "Sharding"),
    *("Path", "PathLike", "ContextManager"),
}


def texts(site):
    """Each page of the reference: its name, its HTML, and its text without programs."""
    for page in sorted((site / "reference").glob("*.html")):
        shown = page.read_text().partition("<article")[2].partition("</article")[0]
        prose = re.sub(r"<pre.*?</pre>", "", shown, flags=re.S)
        yield page.stem, shown, plain(prose)


def plain(shown):
    return html.unescape(re.sub(r"<[^>]+>", "", shown))


def test_the_reference_has_no_private_names(site):
    """No folder, module or class of hostcall's own, nor what only its authors read."""
    private = re.compile(r"(?<![\w/.])_[a-zA-Z]\w*|\w\._[a-z]\w*")
    known = set(dir(builtins)) | set(dir(typing)) | ELSEWHERE
    for _, shown, _ in texts(site):
        known |= set(re.findall(r'<dt class="sig[^"]*" id="[\w.]*\.(\w+)"', shown))
    signature = re.compile(r'<dt class="sig sig-object py"[^>]*>(.*?)</dt>', re.S)
    wrong = []
    for page, shown, prose in texts(site):
        wrong += [(page, line) for line in prose.splitlines() if private.search(line)]
        for found in signature.finditer(shown):
            arguments = plain(found[1]).partition("(")[2]
            classes = re.findall(r"(?<![.\w'])[A-Z]\w+", arguments)
            wrong += [(page, name) for name in classes if name not in known]
    assert wrong == []


def test_entries_of_the_reference_have_one_name_each(site):
    """A sentence is no entry, "part, parts" no name with a type, and no mark is left."""
    wrong = []
    for page, shown, prose in texts(site):
        fields = re.findall(r'<dl class="field-list.*?</dl>', shown, re.S)
        for name in re.findall(r"<strong>(.*?)</strong>", "".join(fields), re.S):
            if not re.fullmatch(
                r"\*{0,2}[a-z][\w ,.*]*(?<![,.])|[A-Z]\w+", plain(name)
            ):
                wrong.append((page, plain(name)))
        wrong += re.findall(r"^.*\((?:\w+, ?)+\) –.*$", prose, re.M)
        wrong += [(page, line) for line in prose.splitlines() if "`" in line]
        if "Return type" in prose:
            wrong.append((page, prose.partition("Return type")[2][:99]))
    assert wrong == []


def test_names_on_pages_exist():
    """Files, and what begins with `hc.`, so that a page does not outlive a name."""
    for page in [*DOCS.rglob("*.md"), ROOT / "CONTRIBUTING.md"]:
        text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
        for name in re.findall(r"`hc((?:\.[a-zA-Z]\w*)+)", text):
            here = hc
            for part in name[1:].split("."):
                assert hasattr(here, part), f"{page.name}: hc{name}"
                here = getattr(here, part)
        for name in re.findall(r"`([a-z_]\w*/[\w./]+\.(?:py|cc|h|md|sh|svg))`", text):
            starts = ROOT, ROOT / "src" / "hostcall", ROOT / "native"
            if any((start / name.split("/")[0]).exists() for start in starts):  # ours
                assert any((s / name).exists() for s in starts), (page.name, name)
