"""Cost of automatic resets: none, exact (`AutoReset`) and pooled (`PooledReset`), with random actions and no training.

    python benchmarks/resets.py [--env brax:hopper --backend spring] [--num-envs 64 2048] [--steps 256]

Prints steps per second (median of 7 alternations) and writes benchmarks/results/resets.json, with the machine, versions
and command.
"""

import argparse
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import _play
import _record

from jaxrl import envs

DEFAULT = [
    ("gymnax:CartPole-v1", {}),
    ("gymnax:SpaceInvaders-MinAtar", {}),
    ("brax:inverted_pendulum", {"backend": "spring"}),
    ("brax:hopper", {"backend": "spring"}),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--env", help="run one environment instead of all")
    parser.add_argument("--backend", help="physics backend of a brax environment")
    parser.add_argument("--num-envs", type=int, nargs="+", default=[64, 2048])
    parser.add_argument("--steps", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    chosen = DEFAULT
    if arguments.env:
        chosen = [(arguments.env, {"backend": arguments.backend} if arguments.backend else {})]
    rows = []
    for name, parameters in chosen:
        for num_envs in arguments.num_envs:
            row = {"env": name, **parameters, "num_envs": num_envs, "steps": arguments.steps}
            plays = {
                str(auto_reset).lower(): _play.plays(_play.of_jaxrl(env), env.action_space, num_envs, arguments.steps)
                for auto_reset in (None, "exact", "pooled")
                for env in [envs.make(name, auto_reset=auto_reset, **parameters)]
            }
            taken = _record.alternate(plays, arguments.repeats)
            row |= {k: num_envs * arguments.steps / seconds for k, seconds in taken.items()}
            rows.append(row | {"pooled/exact": row["pooled"] / row["exact"]})
            print(_record.table(rows[-1:]), flush=True)
    print(_record.save("resets", rows, repeats=arguments.repeats))


if __name__ == "__main__":
    main()
