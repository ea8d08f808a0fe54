"""Latency of one action of an exported policy on a CPU, compared with `predict` of Stable-Baselines3.

    python benchmarks/export_latency.py [--repeats 7] [--no-peer] [--onnx PYTHON]

The policies are those of benchmarks/policy.py: untrained PPO for CartPole with two hidden layers of 64 tanh units. Each
computes the best action for one NumPy observation, 2,000 times in a row, including the loop around the calls. The same
jaxrl policy runs directly, as StableHLO by `jax.export`, with only NumPy and, if `--onnx` gives the Python of an
environment with jaxrl, jax2onnx and onnxruntime (docs/export.md), with onnxruntime on one thread. SB3 runs in a
separate environment, on one thread. All are warm, and alternate in one run. A batch of 64 is also measured.
"""

import argparse
import functools
import pathlib
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import _record as record
from policy import BATCHES, CALLS, PEER, SB3, Jaxrl, observations


class Exported:
    """An exported policy and its runtime; `form` is "stablehlo", "numpy" or "onnx"."""

    def __init__(self, form):
        import jaxrl

        suffix = {"stablehlo": ".stablehlo", "numpy": ".npz", "onnx": ".onnx"}[form]
        with tempfile.TemporaryDirectory() as folder:
            path = jaxrl.export_policy(Jaxrl().policy, pathlib.Path(folder) / f"policy{suffix}", to=form)
            self.act = {"stablehlo": _of_stablehlo, "numpy": _of_numpy, "onnx": _of_onnx}[form](path)

    def __call__(self, *, batch: int | None) -> float:
        given = observations(batch)
        if batch is None:
            given = given[:, None]
        self.act(given[0])
        start = time.perf_counter()
        for observation in given:
            self.act(observation)
        return time.perf_counter() - start


def _of_stablehlo(path):
    import jax
    import jax.export
    import numpy as np

    program = jax.jit(jax.export.deserialize(bytearray(path.read_bytes())).call)

    def act(observation):
        size = len(observation)
        return np.asarray(program(observation, (), np.zeros(size, bool), np.zeros(size, np.float32))[0])

    return act


def _of_numpy(path):
    from jaxrl.export import numpy_policy

    policy = numpy_policy.load(path)
    return lambda observation: policy(observation)[0]


def _of_onnx(path):
    import numpy as np
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(path.read_bytes(), options)
    read = {x.name for x in session.get_inputs()}

    def act(observation):
        size = len(observation)
        inputs = {"observation": observation, "first": np.zeros(size, bool), "reward": np.zeros(size, np.float32)}
        return session.run(["action"], {name: x for name, x in inputs.items() if name in read})[0]

    return act


WAYS = {
    "jaxrl": Jaxrl,
    "StableHLO": functools.partial(Exported, "stablehlo"),
    "numpy": functools.partial(Exported, "numpy"),
    "ONNX": functools.partial(Exported, "onnx"),
    "SB3": SB3,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--onnx", metavar="PYTHON")
    arguments = parser.parse_args()
    here, own = pathlib.Path(__file__), {"PYTHONPATH": str(record.ROOT)}
    pythons = dict.fromkeys(("jaxrl", "StableHLO", "numpy"), (sys.executable, own))
    if arguments.onnx:
        pythons["ONNX"] = (arguments.onnx, own)
    if not arguments.no_peer:
        pythons["SB3"] = (record.peer_python("sb3", PEER), {})
    workers = {name: record.Worker(python, here, variables) for name, (python, variables) in pythons.items()}
    rows = []
    try:
        for batch in BATCHES:
            asks = {name: functools.partial(worker.ask, name=name, batch=batch) for name, worker in workers.items()}
            seconds = record.alternate(asks, arguments.repeats)
            row = {"observations a call": batch or 1}
            row |= {f"{name} (µs a call)": value / CALLS * 1e6 for name, value in seconds.items()}
            if "SB3" in seconds:
                row |= {f"{name} / SB3": value / seconds["SB3"] for name, value in seconds.items() if name != "SB3"}
            rows.append(row)
            print(record.table([row]), flush=True)
    finally:
        for worker in workers.values():
            worker.close()
    print(record.save("export-latency", rows, repeats=arguments.repeats))


def answer_requests() -> None:
    made = {}

    def answer(*, name: str, batch: int | None) -> float:
        if name not in made:
            made[name] = WAYS[name]()
        return made[name](batch=batch)

    record.serve(answer)


if __name__ == "__main__":
    answer_requests() if "--serve" in sys.argv else main()
