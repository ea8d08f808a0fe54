"""Long trainings leave a record: `make learning` writes benchmarks/results/learning-*.json."""

import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "benchmarks"))
import _record  # noqa: E402


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
