"""Installed distributions, as far as their entry points go."""

import tomllib
from pathlib import Path


def install(folder: Path, pyproject: str) -> None:
    """Leave in a folder of `sys.path` what an installer leaves of a project."""
    project = tomllib.loads(pyproject)["project"]
    info = folder / f"{project['name']}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    lines = [
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in entries.items())
        for group, entries in project["entry-points"].items()
    ]
    (info / "entry_points.txt").write_text("\n".join(lines))


def install_suite(folder: Path, suite: str, code: str, *, distribution: str | None = None) -> None:
    """A distribution with one suite and its module, both of one name unless `distribution` is another."""
    name = distribution or suite
    module = name.replace("-", "_")
    (folder / f"{module}.py").write_text(code)
    project = f'[project]\nname = "{name}"\nversion = "2.0"\n[project.entry-points."jaxrl.suites"]\n'
    install(folder, f'{project}"{suite}" = "{module}"\n')
