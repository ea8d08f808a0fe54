"""Small animations of trained policies for docs/gallery.md: short runs of one command each, seed 0.

    python benchmarks/gallery.py [--only pendulum acrobot]

After each run, its episode is saved to `docs/assets/gallery/NAME.gif` and its score to
`benchmarks/results/gallery.json`, so a session that ends early leaves complete entries. `scripts/update_results.py`
adds them to the page.
"""

import argparse
import json
import pathlib
import shlex
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import _record as record
import curves
from PIL import Image, ImageSequence

FOLDER = record.ROOT / "docs" / "assets" / "gallery"
WIDTH, FRAMES, COLORS = 200, 120, 32  # of a picture, at most
SLOWEST = 150  # milliseconds of a frame: long episodes are shown faster than they are
# By name: what one sees, and what follows `jaxrl train`.
COMMANDS = {
    "pendulum": ("SAC swings the pendulum up and holds it", curves.COMMANDS["sac"]),
    "acrobot": ("PQN swings the tip of the acrobot above the line", "pqn --env gymnax:Acrobot-v1 --total-steps 500000"),
    "mountaincar": ("PQN gathers speed for the hill", "pqn --env gymnax:MountainCar-v0 --total-steps 500000"),
    "freeway": ("PQN crosses MinAtar's road", "pqn --env gymnax:Freeway-MinAtar --total-steps 1000000"),
    "asterix": (
        "PQN collects and dodges in MinAtar's Asterix",
        "pqn --env gymnax:Asterix-MinAtar --total-steps 1000000",
    ),
    "spaceinvaders": (
        "PQN shoots MinAtar's invaders",
        "pqn --env gymnax:SpaceInvaders-MinAtar --total-steps 1000000",
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=COMMANDS, default=list(COMMANDS))
    arguments = parser.parse_args()
    for name in arguments.only:
        with tempfile.TemporaryDirectory() as folder:
            print(name, entry(name, pathlib.Path(folder)), flush=True)


def entry(name: str, folder: pathlib.Path) -> float:
    """Train and render one policy; return its score."""
    what, command = COMMANDS[name]
    words = ["train", *shlex.split(command), "--seed", "0", "--run-dir", "run", "--checkpoint-every", "0"]
    curves.jaxrl([*words, "--evaluation-episodes", "128", "--no-progress"], folder)
    curves.jaxrl(["render", "run", "--out", "episode.gif"], folder)
    found = json.loads((folder / "run" / "result.json").read_text())["evaluation"]
    shrink(folder / "episode.gif", FOLDER / f"{name}.gif")
    part = {"what": what, "run": f"jaxrl train {command}", "evaluation": found, "machine": record.machine()}
    record.save_part(record.HERE / "results" / "gallery.json", name, part)
    return found["return_mean"]


def shrink(source: pathlib.Path, out: pathlib.Path) -> None:
    """Write a GIF with fewer, smaller frames."""
    with Image.open(source) as picture:
        duration = picture.info["duration"]  # of a frame; the last one lasts longer
        frames = [frame.convert("RGB") for frame in ImageSequence.Iterator(picture)]
    every = -(-len(frames) // FRAMES)
    size = (WIDTH, round(frames[0].height * WIDTH / frames[0].width))
    small = [frame.resize(size, Image.Resampling.BOX).quantize(COLORS) for frame in frames[::every]]
    out.parent.mkdir(parents=True, exist_ok=True)
    durations = [*[min(duration * every, SLOWEST)] * (len(small) - 1), 1000]
    small[0].save(out, save_all=True, append_images=small[1:], duration=durations, loop=0, optimize=True)


if __name__ == "__main__":
    main()
