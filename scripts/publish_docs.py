"""Publish the built site to a folder with one site per version, ready for a web server.

.venv/bin/python scripts/publish_docs.py build/docs/site PUBLISHED

The site is copied to PUBLISHED/0.1.0. PUBLISHED/versions.json lists all versions, newest first, for the version
selector in each page's header, and PUBLISHED/index.html redirects to the newest.
"""

import json
import shutil
import sys
import tomllib
from pathlib import Path

from packaging.version import Version

ROOT = Path(__file__).parents[1]
_INDEX = """<!doctype html>
<meta charset="utf-8">
<title>jaxrl</title>
<meta http-equiv="refresh" content="0; url={newest}/index.html">
<a href="{newest}/index.html">jaxrl {newest}</a>
"""


def publish(site: Path, target: Path, version: str) -> None:
    """Copy `site` to the folder `version` in `target`, replacing an existing one, and update the list of versions."""
    shutil.rmtree(target / version, ignore_errors=True)
    shutil.copytree(site, target / version)
    found = sorted((Version(path.parent.name) for path in target.glob("*/index.html")), reverse=True)
    listed = [{"version": str(x), "title": str(x), "aliases": ["latest"] if x == found[0] else []} for x in found]
    (target / "versions.json").write_text(json.dumps(listed, indent=2) + "\n")
    (target / "index.html").write_text(_INDEX.format(newest=found[0]))


if __name__ == "__main__":
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    publish(Path(sys.argv[1]), Path(sys.argv[2]), project["version"])
