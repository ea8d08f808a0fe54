"""Speed and memory of exporting a policy's episodes as an RLDS dataset.

    python benchmarks/datasets.py [--episodes 5000 50000 200000]

CartPole with random actions (sampled from an untrained policy), the worst case: episodes of about 22 transitions, in
128 parallel environments. Every number of episodes is exported in a separate process, whose peak resident memory is
reported; the time is that of a second export in the process, from the call to the renamed and re-read directory, with
everything compiled. It is compared with TFDS's `SequentialWriter`, which writes the first 1,000 of these episodes from
lists of steps; the time to create the lists is excluded.
"""

import argparse
import json
import os
import pathlib
import resource
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import _record as record


def export(episodes: int) -> dict:
    """Return one row; runs in a separate process."""
    import jax
    import numpy as np

    import jaxrl
    from jaxrl.core.schedules import resolve_schedules
    from jaxrl.core.types import env_spec
    from jaxrl.run.policies.policy import Policy

    env = jaxrl.make("gymnax:CartPole-v1")
    spec = env_spec(jaxrl.envs.prepared(env))
    algo = resolve_schedules(jaxrl.PPO().resolve(spec, 1), np.float32(0.0))
    policy = Policy(algo, algo.actor(algo.init(jax.random.key(0), spec)), spec)
    with tempfile.TemporaryDirectory() as folder:

        def run(name, count):
            path = pathlib.Path(folder) / name
            start = time.perf_counter()
            jaxrl.export_rlds(policy, env, path, episodes=count, num_envs=128, explore=True, progress=False)
            return path, time.perf_counter() - start

        run("warm", 1000)
        path, seconds = run("data", episodes)
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        dataset = jaxrl.load_dataset(f"rlds:{path}")
        start = time.perf_counter()
        lengths = [episode.length for episode in dataset]
        reading = time.perf_counter() - start
        size = sum(file.stat().st_size for file in path.iterdir())
        transitions = sum(lengths)
        return {
            "writer": "jaxrl",
            "episodes": episodes,
            "transitions": transitions,
            "seconds": seconds,
            "steps_per_second": transitions / seconds,
            "peak_memory_mb": memory,
            "file_mb": size / 2**20,
            "read_steps_per_second": transitions / reading,
        } | ({} if episodes < 1000 else {"sequential_writer": sequential_writer(dataset, pathlib.Path(folder))})


def sequential_writer(dataset, folder: pathlib.Path) -> dict:
    """Measure TFDS's own writer with the first 1,000 episodes."""
    import jax
    import tensorflow_datasets as tfds

    episodes = [dataset[index] for index in range(1000)]
    rows = [
        {"steps": [jax.tree.map(lambda x, i=i: x[i], one.steps) for i in range(one.length + 1)]} | dict(one.metadata)
        for one in episodes
    ]
    path = folder / "theirs"
    path.mkdir()
    identity = tfds.core.DatasetIdentity(
        name="theirs", version=tfds.core.Version("1.0.0"), data_dir=os.fspath(path), module_name=""
    )
    features = tfds.builder_from_directory(os.fspath(dataset.path)).info.features
    info = tfds.core.DatasetInfo(builder=identity, features=features)
    writer = tfds.core.SequentialWriter(info, max_examples_per_shard=100_000, file_format="array_record")
    writer.initialize_splits(["train"])
    start = time.perf_counter()
    writer.add_examples({"train": rows})
    writer.close_splits(["train"])
    seconds = time.perf_counter() - start
    transitions = sum(one.length for one in episodes)
    return {"transitions": transitions, "seconds": seconds, "steps_per_second": transitions / seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--episodes", type=int, nargs="+", default=[5000, 50_000, 200_000])
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one is not None:
        print("@" + json.dumps(export(asked.one)))
        return
    rows, theirs = [], {}
    for episodes in asked.episodes:
        command = [sys.executable, __file__, "--one", str(episodes)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        row = json.loads(next(line[1:] for line in done.stdout.splitlines() if line.startswith("@")))
        theirs = row.pop("sequential_writer", theirs)
        rows.append(row)
    print(record.table(rows))
    if theirs:
        print(f"TFDS's SequentialWriter: {theirs['steps_per_second']:,.0f} steps/s")
    print(record.save("datasets", rows, sequential_writer=theirs, load=os.getloadavg()[0]))


if __name__ == "__main__":
    main()
