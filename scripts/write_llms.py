"""Add llms.txt, llms-full.txt and the Markdown source of every page to a built site (llmstxt.org).

.venv/bin/python scripts/write_llms.py build/docs/site

The Markdown of a page is self-contained: included files are inserted, and each name of the API reference is replaced by
its signature and docstring. Files are laid out as in docs/, so links lead to the Markdown of other pages.
"""

import importlib
import inspect
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
_SNIPPET = re.compile(r'^--8<-- "(.+)"$', re.MULTILINE)
_REFERENCE = re.compile(r"^::: (\S+)\n(?:    .*\n)*", re.MULTILINE)
_LONGEST = 160  # characters of a description


def write(site: Path) -> None:
    """Write all files into the site's folder."""
    config = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]
    lines, whole = [f"# {config['site_name']}", "", f"> {config['site_description']}"], []
    lines += ["", "Pages as Markdown, by section; [llms-full.txt](llms-full.txt) has all of them in one file."]
    for section, entries in sections(config["nav"]):
        lines += ["", f"## {section}", ""]
        for name, path in entries:
            text = markdown(path)
            target = site / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text)
            lines.append(f"- [{name}]({path}): {description(text)}")
            whole.append(f"<!-- {path} -->\n\n{text.strip()}\n")
    (site / "llms.txt").write_text("\n".join(lines) + "\n")
    (site / "llms-full.txt").write_text("\n\n".join(whole))


def sections(nav: list[dict[str, Any]]) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return the sections of the navigation, each with the names and paths of its pages; a single page is a section."""
    found = []
    for entry in nav:
        for name, target in entry.items():
            pages = [(name, target)] if isinstance(target, str) else [pair for one in target for pair in one.items()]
            found.append((name, pages))
    return found


def markdown(path: str) -> str:
    """Return the Markdown of a page of docs/ with included files inserted."""
    text = _SNIPPET.sub(lambda found: (ROOT / found[1]).read_text().rstrip(), (ROOT / "docs" / path).read_text())
    return _REFERENCE.sub(lambda found: entry(found[1]), text)


def description(text: str) -> str:
    """Return the first sentence of a page, without links and emphasis."""
    prose = re.sub(r"^(```+).*?^\1$|<[^>]+>", "", text, flags=re.MULTILINE | re.DOTALL)
    first = next((one for one in prose.split("\n\n") if one.strip() and not re.match(r"\s*(#|!\[|\||- |\$)", one)), "")
    plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", " ".join(first.split()))
    plain = plain.replace("**", "")
    found = re.match(r".*?[.](?=\s+[A-Z`]|$)", plain)
    sentence = (found[0] if found else plain).rstrip(":")
    return sentence if len(sentence) <= _LONGEST else sentence[:_LONGEST].rsplit(" ", 1)[0].rstrip(",;") + " ..."


def entry(name: str) -> str:
    """Return the Markdown of a name in the API reference: signatures and docstrings of it and its public members."""
    found, parts = importlib.import_module("jaxrl"), name.split(".")
    for position, part in enumerate(parts[1:], 2):
        if not hasattr(found, part):
            importlib.import_module(".".join(parts[:position]))
        found = getattr(found, part)
    blocks = [_block(name, found)]
    members = vars(found).items() if inspect.ismodule(found) or inspect.isclass(found) else ()
    for member, value in members:
        value = value.__func__ if isinstance(value, staticmethod | classmethod) else value
        own = found.__name__ if inspect.ismodule(found) else getattr(found, "__module__", None)
        documented = isinstance(value, property) or inspect.isfunction(value) or inspect.isclass(value)
        if not member.startswith("_") and documented and getattr(value, "__module__", own) == own and value.__doc__:
            blocks.append(_block(f"{name}.{member}", value))
    return "\n".join(blocks)


def _block(name: str, value: Any) -> str:
    signature = ""
    if callable(value):
        try:
            signature = re.sub(r" at 0x[0-9a-f]+|(?<=pathlib\.)_\w+\.", "", str(inspect.signature(value)))
        except (TypeError, ValueError):  # classes implemented in C, and protocols
            signature = ""
    lines = inspect.cleandoc(value.__doc__ or "").split("\n")
    return "\n".join(
        [f"### `{name}`", "", *([f"```python\n{name}{signature}\n```", ""] if signature else []), *lines, ""]
    )


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    write(Path(sys.argv[1]))
