"""Compatibility of exported RLDS datasets with TensorFlow.

    python benchmarks/in_tensorflow.py [--episodes 200]

For each supported type and file format, a small dataset of numbers and images of that type is written, and a dataset of
a policy's episodes on CartPole. In an environment with TensorFlow (created under `.cache/peers` on first use), each is
opened with `tfds.builder_from_directory`, and every field of the steps must have the same type, shape and bits as with
`jaxrl.load_dataset`. TFRecord files are read with `as_dataset`; ArrayRecord files, which it does not support, with
`as_data_source`. Rejected datasets are reported with the error message.
"""

import argparse
import hashlib
import pathlib
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import _record as record

TENSORFLOW = ("tensorflow-cpu==2.21.0", "tensorflow-datasets==4.9.10", "array-record==0.8.6")
TYPES = "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 bfloat16 float32 float64".split()


def digest(steps) -> dict[str, str]:
    """Return the type, shape and bits of each field, by path."""
    found = {}
    for name, x in steps.items():
        if isinstance(x, dict):
            found |= {f"{name}/{below}": text for below, text in digest(x).items()}
        else:
            found[name] = f"{x.dtype} {x.shape} {hashlib.sha256(x.tobytes()).hexdigest()}"
    return found


def read_in_tensorflow(path: str, way: str) -> dict:
    """Return the digests of each episode, read with this method; runs in the environment with TensorFlow."""
    import numpy as np
    import tensorflow_datasets as tfds

    def stacked(steps):
        return {k: stacked([s[k] for s in steps]) if isinstance(v, dict) else np.stack([s[k] for s in steps])
                for k, v in steps[0].items()}  # fmt: skip

    try:
        builder = tfds.builder_from_directory(path)
        if way == "as_dataset":
            episodes = (tfds.as_numpy(one["steps"]) for one in builder.as_dataset(split="train", shuffle_files=False))
        else:
            episodes = (one["steps"] for one in builder.as_data_source("train"))
        return {"episodes": [digest(stacked(list(steps))) for steps in episodes]}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"}


def made_up(dtype: str) -> list:
    """Return three episodes with observations of this type: numbers, vectors and images."""
    import ml_dtypes  # noqa: F401 (bfloat16 is one of its types)
    import numpy as np

    from jaxrl.data import Episode

    def episode(seed):
        rng, steps = np.random.default_rng(seed), 4 + seed
        marks = np.zeros((3, steps), bool)
        marks[0, 0] = marks[1, -1] = True
        rewards = rng.normal(size=(2, steps)).astype(np.float32)
        observation = {
            name: rng.integers(0, 100, (steps, *shape)).astype(dtype)
            for name, shape in (("number", ()), ("vector", (3,)), ("picture", (5, 4, 1)))
        }
        return Episode(observation, rng.integers(0, 5, steps).astype(np.int32), *rewards, *marks)

    return [episode(seed) for seed in range(3)]


def written(folder: pathlib.Path, episodes: int):
    """Return (content, file format, directory) of every dataset."""
    import jax
    import numpy as np

    import jaxrl
    from jaxrl.core.schedules import resolve_schedules
    from jaxrl.core.types import env_spec
    from jaxrl.data.rlds import FILE_FORMATS
    from jaxrl.run.policies.policy import Policy

    env = jaxrl.make("gymnax:CartPole-v1")
    spec = env_spec(jaxrl.envs.prepared(env))
    algo = resolve_schedules(jaxrl.PPO().resolve(spec, 1), np.float32(0.0))
    policy = Policy(algo, algo.actor(algo.init(jax.random.key(0), spec)), spec)
    for file_format in FILE_FORMATS:
        for dtype in TYPES:
            with jaxrl.data.RldsWriter(folder / file_format / dtype, dtype, file_format=file_format) as writer:
                for one in made_up(dtype):
                    writer.write(one)
                yield dtype, file_format, writer.close()
        path = folder / file_format / "cartpole"
        settings = {"episodes": episodes, "explore": True, "file_format": file_format, "progress": False}
        yield "CartPole", file_format, jaxrl.export_rlds(policy, env, path, **settings)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--episodes", type=int, default=200)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.serve:
        record.serve(read_in_tensorflow)
        return
    import jaxrl

    worker = record.Worker(record.peer_python("tensorflow", TENSORFLOW), pathlib.Path(__file__))
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for holds, file_format, path in written(pathlib.Path(folder), asked.episodes):
            ours = [digest(one.steps) for one in jaxrl.load_dataset(f"rlds:{path}")]
            way = "as_dataset" if file_format == "tfrecord" else "as_data_source"
            theirs = worker.ask(path=str(path), way=way)
            same = theirs.get("episodes") == ours
            result = "the same" if same else theirs.get("error", "other values")
            about = {"holds": holds, "file_format": file_format, "read_with": way}
            rows.append(about | {"episodes": len(ours), "result": result})
    worker.close()
    print(record.table(rows))
    print(record.save("in-tensorflow", rows, tensorflow=list(TENSORFLOW)))


if __name__ == "__main__":
    main()
