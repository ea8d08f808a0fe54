"""The documentation as a site: every page and every public name is in it, it builds strictly, and its links lead on."""

import importlib.util
import inspect
import pydoc
import re
import shutil
import tomllib
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote, urlsplit

import pytest
from helpers.processes import python
from helpers.strict_json import read_json

ROOT = Path(__file__).parents[1]
REFERENCE = ROOT / "docs" / "reference"
# The packages that list what they export to users.
LISTED = ("jaxrl", "jaxrl.algos", "jaxrl.data", "jaxrl.envs", "jaxrl.networks")


def pages(entries):
    """Yield the files that a navigation names."""
    for entry in entries:
        for target in entry.values():
            yield from [target] if isinstance(target, str) else pages(target)


def test_every_page_is_in_the_navigation():
    config = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]
    named = list(pages(config["nav"]))
    assert sorted(named) == sorted({str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")})


# --- the reference -------------------------------------------------------------------------------------------------


def public(module):
    """Return what a module exports: what it lists, else what it defines."""
    if hasattr(module, "__all__"):
        return [getattr(module, name) for name in module.__all__]
    own = [thing for name, thing in vars(module).items() if not name.startswith("_")]
    return [thing for thing in own if getattr(thing, "__module__", None) == module.__name__]


def test_every_public_name_stands_in_a_page_of_the_reference():
    text = "\n".join(path.read_text() for path in sorted(REFERENCE.glob("*.md")))
    entries = [pydoc.locate(name) for name in re.findall(r"^::: (\S+)$", text, re.MULTILINE)]
    assert None not in entries, "one of them is not there"
    shown = {id(entry) for entry in entries}
    for module in filter(inspect.ismodule, entries):
        shown |= {id(thing) for thing in public(module)}
    for name in LISTED:
        module = pydoc.locate(name)
        missing = [thing for thing in public(module) if not isinstance(thing, ModuleType) and id(thing) not in shown]
        assert missing == [], name
        for part in filter(inspect.ismodule, public(module)):  # jaxrl.networks and the like
            assert [thing for thing in public(part) if callable(thing) and id(thing) not in shown] == [], part


def test_every_public_name_says_what_it_is():
    for module in map(pydoc.locate, LISTED):
        assert [thing for thing in public(module) if not inspect.getdoc(thing)] == []


# --- the site ------------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """The anchors of a page, what it links to, and what it loads."""

    def __init__(self, text):
        super().__init__()
        self.anchors, self.links, self.loaded = set(), set(), set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.anchors |= {given[name] for name in ("id", "name") if given.get(name)}
        if tag == "a" and given.get("href") is not None:
            self.links.add(given["href"])
        elif tag == "link" and given.get("rel") not in ("canonical", "next", "prev"):
            self.loaded.add(given.get("href"))
        elif tag in ("script", "img", "iframe", "source", "video") and given.get("src"):
            self.loaded.add(given["src"])


def script(name):
    """Import a file of scripts/ as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_llms(folder):
    """Write the files for language models, as `make docs` does after the site is built."""
    folder.mkdir(exist_ok=True)
    script("write_llms").write(folder)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    if importlib.util.find_spec("zensical") is None:
        pytest.skip("zensical is not installed: pip install -e '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    for name in ("docs", "jaxrl"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("zensical.toml", "CHANGELOG.md", "CONTRIBUTING.md"):
        shutil.copy(ROOT / name, folder / name)
    python("-m", "zensical", "build", "--strict", cwd=folder)
    write_llms(folder / "site")
    return folder / "site"


@pytest.mark.long
def test_every_link_of_the_site_leads_on_and_nothing_is_loaded_from_elsewhere(site):
    read = {path: Page(path.read_text()) for path in sorted(site.rglob("*.html")) if path.name != "404.html"}
    assert len(read) > 50
    problems = []
    for path, page in read.items():
        for link in sorted(page.links | page.loaded):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                problems += [f"{path.name} loads {link}"] if link in page.loaded else []
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            if not target.is_file():
                problems.append(f"{path.relative_to(site)}: {link} leads nowhere")
            elif parts.fragment and target in read and unquote(parts.fragment) not in read[target].anchors:
                problems.append(f"{path.relative_to(site)}: {link} has no such anchor")
    assert problems == []


def test_llms_txt_has_every_page_of_the_navigation_as_markdown(tmp_path):
    write_llms(tmp_path)
    text, whole = (tmp_path / "llms.txt").read_text(), (tmp_path / "llms-full.txt").read_text()
    write_llms(tmp_path)
    assert (tmp_path / "llms-full.txt").read_text() == whole and " at 0x" not in whole
    nav = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"]
    assert text.startswith("# jaxrl\n\n> Reinforcement learning in JAX")
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == [name for entry in nav for name in entry]
    entries = re.findall(r"^- \[(.+?)\]\((.+?)\): (.+)$", text, re.MULTILINE)
    assert [path for _, path, _ in entries] == list(pages(nav)) and len(entries) == text.count("\n- ")
    for _, path, what in entries:
        page = (tmp_path / path).read_text()
        assert 5 <= len(what) <= 170 and "](" not in what, path
        assert f"<!-- {path} -->" in whole and page.strip() in whole
        assert not re.search(r"^(:::|--8<--)", page, re.MULTILINE), f"{path} includes what is not there"
        for link in re.findall(r"\]\((?!https?:)([^)#\s]+\.md)", page.partition("\n## Source")[0]):
            assert (tmp_path / path).parent.joinpath(link).is_file() or path in ("changelog.md", "contributing.md"), (
                link
            )
    assert "jaxrl.train(algo" in (tmp_path / "reference" / "training.md").read_text()


@pytest.mark.long
def test_the_markdown_of_every_page_lies_beside_it(site):
    made = {path.with_suffix(".html") for path in site.rglob("*.md")}
    assert made == {path for path in site.rglob("*.html") if path.name != "404.html"}


@pytest.mark.long
def test_a_page_of_an_algorithm_has_its_source(site):
    """In what was built the file is there, and its code stays out of the search."""
    for path in sorted((site / "algorithms").glob("*.html")):
        text = path.read_text()
        assert text.count("--8<--") == 0 and "The whole file" in text, path
    index = read_json(site / "search.json")["items"]
    sources = [item for item in index if re.fullmatch(r"algorithms/\w+\.html#source", item["location"])]
    assert sources and all(len(item["text"]) < 200 for item in sources)


def test_versions_of_the_site_lie_side_by_side(tmp_path):
    built, target = tmp_path / "site", tmp_path / "published"
    built.mkdir()
    for version in ("0.2.0", "0.10.0", "0.9.0", "0.9.0"):
        (built / "index.html").write_text(f"of {version}")
        script("publish_docs").publish(built, target, version)
    listed = read_json(target / "versions.json")
    assert [x["version"] for x in listed] == ["0.10.0", "0.9.0", "0.2.0"]
    assert [x["aliases"] for x in listed] == [["latest"], [], []]
    assert [(target / x["version"] / "index.html").read_text() for x in listed] == [
        f"of {x['version']}" for x in listed
    ]
    assert Page((target / "index.html").read_text()).links == {"0.10.0/index.html"}


@pytest.mark.long
def test_equations_are_drawn_without_a_script(site):
    for path in sorted((site / "algorithms").glob("*.html")):
        text = path.read_text()
        assert "<math" in text or path.stem == "bc", path
        assert "$$" not in text and "\x02" not in text, path  # 2: Markdown took a sign of an equation for its own
