"""Long trainings leave a record: `make learning` writes benchmarks/results/learning-*.json."""

import pathlib
import shutil
import sys

import pytest
from helpers.experts import Expert, figures

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
import _record  # noqa: E402
import _zoo  # noqa: E402


@pytest.fixture(scope="session")
def expert():
    return Expert()


@pytest.fixture
def kept_dir(request):
    """Return a folder for the runs of a training of hours, kept until they are over: begun again, they go on."""
    name = request.node.name.translate(str.maketrans("[]", "--")).strip("-")  # no directory of a run has brackets
    folder = _record.kept_folder(name)
    yield folder
    report = getattr(request.node, "report_of_call", None)  # None: another fixture failed
    if report is not None and report.over:
        shutil.rmtree(folder)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.when == "call":
        report.over = call.excinfo is None or call.excinfo.errisinstance(AssertionError)  # a score too low is one
        item.report_of_call = report
    return report


@pytest.fixture
def record():
    """Return a function that records a sweep's scores, with the published one they are compared with."""

    def save(name, result, *, total_steps, reference, source, settings):
        rows = [
            {
                "configuration": {field: str(value) for field, value in configuration.items()},
                **figures(result.scores[index], 2),
                "interquartile_mean": round(float(result.interquartile_means[index]), 2),
            }
            for index, configuration in enumerate(result.configurations)
        ]
        print(f"\n{name}: {rows} against {reference} ({source})")
        path = _record.save(
            f"learning-{name}",
            rows,
            seeds=result.seeds,
            total_steps=total_steps,
            settings=settings,
            reference={"score": reference, "source": source},
            steps_per_second=round(result.steps_per_second),
            wall_seconds=round(result.wall_seconds),
        )
        assert path.exists()

    return save


@pytest.fixture
def record_rows():
    """Return a function that records figures that are compared with nothing published."""

    def save(name, rows, **more):
        print(f"\n{name}: {rows}")
        assert _record.save(f"learning-{name}", rows, **more).exists()

    return save


@pytest.fixture
def record_command():
    """Return a function that records a row of the zoo: the command, every seed's score, and the published one."""

    def save(row, outcome):
        path = _zoo.save(row, outcome)
        print(f"\n{row.record}: {outcome.scores}")
        assert path.exists()

    return save
