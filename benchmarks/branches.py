"""Branch coverage of each package by the quick tests, recorded once in a while.

    uv pip install pytest-cov
    python benchmarks/branches.py

Subprocesses of tests are not measured. Takes twice as long as `make test`.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import _record as record

ROOT = pathlib.Path(__file__).parents[1]


def share(summaries: list[dict[str, int]]) -> float:
    """Return the percentage of branches, as coverage.py counts them, that were taken."""
    taken, branches = (sum(one[name] for one in summaries) for name in ("covered_branches", "num_branches"))
    return round(100 * taken / max(branches, 1), 1)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder) / "coverage.json"
        command = [sys.executable, "-m", "pytest", "-q", "-n", "auto", "--maxprocesses", "4", "--dist", "loadfile"]
        command += ["--cov=jaxrl", "--cov-branch", f"--cov-report=json:{report}"]
        env = os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "COVERAGE_FILE": str(pathlib.Path(folder) / "data")}
        subprocess.run(command, cwd=ROOT, env=env, check=True)
        files = json.loads(report.read_text())["files"]
    packages: dict[str, list[dict[str, int]]] = {}
    for path, found in files.items():
        parts = pathlib.Path(path).parts
        packages.setdefault(parts[1] if len(parts) > 2 else "jaxrl", []).append(found["summary"])
    rows = [{"package": name, "branches taken": share(packages[name])} for name in sorted(packages)]
    print(record.table(rows))
    every = [summary for summaries in packages.values() for summary in summaries]
    print(record.save("branches", rows, taken=share(every)))


if __name__ == "__main__":
    main()
