"""The table of fields on the page of each algorithm, as the code has it.

`tests/test_docs.py` compares the pages with it; `scripts/update_field_tables.py` writes it to the pages.
"""

import dataclasses

from jaxrl.core.schedules import is_schedule

HEADER = "| field | default | traced | what |\n|---|---|---|---|"
LIMITS = {"low": "at least", "above": "more than", "high": "at most", "below": "less than"}


def expected_table(cls: type) -> str:
    """Return the Markdown table of an algorithm's fields and of those of its parts, by dotted names."""
    return "\n".join([HEADER, *_rows(cls, {field.name: field.default for field in dataclasses.fields(cls)})])


def _rows(cls, defaults, within=""):
    """Return a row for each field: name, default, whether it is traced, help and limits."""
    lines = []
    for field in dataclasses.fields(cls):
        limits, part = field.metadata.get("limits", {}), field.metadata.get("part")
        what = [field.metadata.get("help", "")]
        what += [f"{LIMITS[name]} {limit:g}" for name, limit in limits.items() if name in LIMITS]
        if "choices" in limits:
            what.append("one of " + ", ".join(f'`"{choice}"`' for choice in limits["choices"]))
        if field.metadata.get("only_with"):
            what.append(f"only with `{field.metadata['only_with']}`")
        traced = "yes" if field.metadata.get("pytree_node", True) and not part else ""
        default = defaults[field.name]
        lines.append(
            f"| `{within}{field.name}` | `{written(default)}` | {traced} | {'; '.join(text for text in what if text)} |"
        )
        if part:
            own = part() if default is None else default
            lines += _rows(part, vars(own), f"{within}{field.name}.")
    return lines


def written(value: object) -> str:
    """Return a default as a reader would type it: only what differs from a class's own defaults is named."""
    if isinstance(value, bool) or value is None:
        return repr(value)
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, str):
        return f'"{value}"'
    if is_schedule(value):
        numbers = (getattr(value, field.name) for field in dataclasses.fields(value))
        return f"{type(value).__name__}({', '.join(map(written, map(float, numbers)))})"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        usual = type(value)()
        named = [f.name for f in dataclasses.fields(value) if getattr(value, f.name) != getattr(usual, f.name)]
        return f"{type(value).__name__}({', '.join(f'{name}={written(getattr(value, name))}' for name in named)})"
    return repr(value)


def with_table(text: str, table: str) -> str:
    """Return a page with its table of fields replaced.

    Raises:
      ValueError: the page has no table of fields.
    """
    start = text.find(HEADER)
    if start < 0:
        raise ValueError("no table of fields on this page")
    end = start
    while text.startswith("|", end):
        end = text.index("\n", end) + 1
    rest = text[end:].lstrip("\n")  # without a blank line, what follows would be the table's last line
    return f"{text[:start]}{table}\n\n{rest}"
