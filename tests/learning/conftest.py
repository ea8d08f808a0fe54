"""Long trainings leave a record: `make learning` writes benchmarks/results/learning-*.json."""

import pathlib
import shutil
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
import _record  # noqa: E402
import _zoo  # noqa: E402


@pytest.fixture
def kept_dir(request):
    """A folder for the runs of a training of hours, kept until they are over: begun again, they go on."""
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
    """Writes down a sweep's scores, beside the published one they are held against."""

    def save(name, result, *, total_steps, reference, source, settings):
        scores = result.scores
        rows = [
            {
                "configuration": {field: str(value) for field, value in configuration.items()},
                "scores": [round(float(score), 2) for score in scores[index]],
                "mean": round(float(scores[index].mean()), 2),
                "worst": round(float(scores[index].min()), 2),
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
    """Writes down figures that are held against nothing published."""

    def save(name, rows, **more):
        print(f"\n{name}: {rows}")
        assert _record.save(f"learning-{name}", rows, **more).exists()

    return save


@pytest.fixture
def record_command():
    """Writes down what a row of the zoo came to: the command, every seed's score, and the published one."""

    def save(row, outcome):
        path = _zoo.save(row, outcome)
        print(f"\n{row.record}: {outcome.scores}")
        assert path.exists()

    return save
