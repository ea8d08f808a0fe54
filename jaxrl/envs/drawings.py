"""Drawings of environment states with numpy and pillow, as uint8 RGB frames of shape (height, width, 3).

A drawing has two functions: a JAX function that selects the data to draw (the view) during the episode, and a numpy
function that draws a frame from a view. So only the view is copied from the device.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from jaxrl.core import spaces
from jaxrl.core.errors import ConfigError
from jaxrl.core.types import Environment, PyTree, TimeStep
from jaxrl.envs.suite import foreign_rules

_WHITE, _BLACK, _GREY = (255, 255, 255), (20, 20, 20), (120, 120, 120)
_BLUE, _ORANGE, _GREEN, _RED = (0, 114, 178), (230, 159, 0), (0, 158, 115), (213, 94, 0)
# One color per plane of a grid world; plane 0 is usually the player. They are Okabe and Ito's colors and four others.
_PLANES = np.asarray(
    [
        (86, 180, 233), (230, 159, 0), (90, 90, 90), (0, 158, 115), (213, 94, 0),
        (240, 228, 66), (204, 121, 167), (0, 114, 178), (200, 200, 200), (150, 90, 220),
    ],
    np.uint8,
)  # fmt: skip
_SIDE = 240  # approximate number of pixels of a picture's longer side
_SMOOTH = 3  # factor of supersampling: pictures are drawn this much larger, then scaled down to smooth edges


@dataclasses.dataclass(frozen=True)
class Drawing:
    """A pair of functions that draw an environment.

    Attributes:
      view: a pure JAX function `view(env, state, time_step)` that returns a pytree of the arrays to draw; `env` and
        `state` are those of the innermost environment, without wrappers.
      draw: a function that takes one view, as numpy arrays, and returns a frame, uint8 (height, width, 3).
      frames_per_second: the rate at which an episode looks natural.
    """

    view: Callable[[Any, PyTree, TimeStep], PyTree]
    draw: Callable[[Any], np.ndarray]
    frames_per_second: float = 30.0


_DRAWINGS: dict[str, Drawing] = {}


def register(name: str, drawing: Drawing) -> None:
    """Register `drawing` for environments whose attribute `name` equals this `name`, such as "suite:name"."""
    _DRAWINGS[name] = drawing


def drawing_of(env: Environment, observation_space: spaces.Space) -> Drawing:
    """Return the registered drawing of `env`, or a drawing of its observations if they are images.

    Args:
      env: the environment without its wrappers.
      observation_space: the observation space of the environment with its wrappers.

    Raises:
      ConfigError: the environment cannot be drawn; the message lists environments that can.
    """
    own = _DRAWINGS.get(env.name, getattr(env, "drawing", None))
    if isinstance(own, Drawing):
        return own
    if isinstance(observation_space, spaces.Box) and len(observation_space.shape) in (2, 3):
        low, high = float(np.min(observation_space.low)), float(np.max(observation_space.high))
        bounds = (low, high) if observation_space.bounded and high > low else None
        return Drawing(lambda env, state, time_step: time_step.observation, lambda x: image(x, bounds), 10.0)
    raise ConfigError(
        f"{env.name} cannot be drawn: its observation {observation_space} is not an image, and there is no drawing for "
        f"it; environments with drawings: {', '.join(sorted(_DRAWINGS))}, brax, and most suites; add a drawing with "
        "jaxrl.envs.drawings.register"
    )


# --- images and grid worlds --------------------------------------------------------------------------------------


def disks(view: Callable[[Any, PyTree, TimeStep], PyTree]) -> Drawing:
    """Return a drawing of blue (0), red (1) and gray (2) disks in a square of side 1.

    Args:
      view: a function for `Drawing.view` that returns an array [disks, 4]: x, y, radius and color number of each disk.
    """

    def draw(things: np.ndarray) -> np.ndarray:
        canvas = _Canvas(0.0, 1.0, 0.0, 1.0)
        for x, y, radius, color in things[::-1]:
            canvas.disc((x, y), radius, (_BLUE, _RED, _GREY)[int(color)])
        return canvas.frame()

    return Drawing(view, draw, 8.0)


def image(pixels: np.ndarray, bounds: tuple[float, float] | None = None) -> np.ndarray:
    """Convert an image observation (gray, RGB, stacked gray frames or planes of a grid world) to an enlarged frame.

    Args:
      pixels: an array of shape (height, width) or (height, width, channels). One channel is gray, and three are RGB.
        With another number of channels, uint8 channels are stacked frames, and the last one is drawn. Channels of
        another dtype, or more channels than pixels on the longer side, are planes in separate colors.
      bounds: the values drawn as black and white; None means 0 and 255 for uint8, otherwise the minimum and maximum.
    """
    pixels = pixels[..., None] if pixels.ndim == 2 else pixels
    channels = pixels.shape[-1]
    if channels not in (1, 3):
        if pixels.dtype != np.uint8 or channels > max(pixels.shape[:2]):
            return planes(pixels)
        pixels = pixels[..., -1:]
    if pixels.dtype != np.uint8:
        low, high = bounds or (float(pixels.min()), float(pixels.max()))
        pixels = np.clip((pixels.astype(np.float32) - low) / max(high - low, 1e-8) * 255.0, 0, 255).astype(np.uint8)
    return _enlarged(np.broadcast_to(pixels, (*pixels.shape[:2], 3)))


def planes(grid: np.ndarray) -> np.ndarray:
    """Draw a grid world of shape (height, width, planes), with each cell in the color of its first positive plane."""
    there = grid > 0
    colors = _PLANES[np.arange(grid.shape[-1]) % len(_PLANES)]
    first = colors[np.argmax(there, axis=-1)]
    return _enlarged(np.where(there.any(axis=-1, keepdims=True), first, np.uint8(20)))


def _enlarged(pixels):
    times = max(1, _SIDE // max(pixels.shape[:2]))
    return np.repeat(np.repeat(pixels, times, axis=0), times, axis=1)


def _see_planes(env, state, time_step):
    # The observation is computed again, because wrappers may have flattened or stacked the time step's.
    with foreign_rules():
        return env.foreign[0].get_obs(state) > 0


for _name in ("Asterix", "Breakout", "Freeway", "Seaquest", "SpaceInvaders"):
    register(f"gymnax:{_name}-MinAtar", Drawing(_see_planes, planes, 15.0))


# --- classic control ---------------------------------------------------------------------------------------------


class _Canvas:
    """A picture with coordinates in an environment's units and the y axis pointing up.

    Args:
      left, right, bottom, top: bounds of the picture in the environment's units.
    """

    def __init__(self, left: float, right: float, bottom: float, top: float):
        self._left, self._top = left, top
        self._scale = _SMOOTH * _SIDE / max(right - left, top - bottom)
        width, height = (max(_SMOOTH, round(self._scale * extent)) for extent in (right - left, top - bottom))
        self._image = Image.new("RGB", (width, height), _WHITE)
        self._draw = ImageDraw.Draw(self._image)

    def line(self, points: Sequence[tuple[float, float]], color, width: float) -> None:
        self._draw.line([self._at(*p) for p in points], color, max(1, round(width * self._scale)), joint="curve")

    def rod(self, start: tuple[float, float], end: tuple[float, float], color, width: float) -> None:
        """Draw a line with round ends."""
        self.line([start, end], color, width)
        self.disc(start, width / 2, color)
        self.disc(end, width / 2, color)

    def disc(self, center: tuple[float, float], radius: float, color) -> None:
        (x, y), r = self._at(*center), radius * self._scale
        self._draw.ellipse([x - r, y - r, x + r, y + r], color)

    def box(self, center: tuple[float, float], width: float, height: float, color) -> None:
        (x, y), w, h = self._at(*center), width / 2 * self._scale, height / 2 * self._scale
        self._draw.rectangle([x - w, y - h, x + w, y + h], color)

    def frame(self) -> np.ndarray:
        width, height = (side // _SMOOTH for side in self._image.size)
        return np.asarray(self._image.resize((width, height), Image.Resampling.BOX))

    def _at(self, x, y):
        return (x - self._left) * self._scale, (self._top - y) * self._scale


def _see(env, state, time_step):
    """Return the environment's parameters and the fields of its state, by name."""
    return vars(env.params) | vars(state)


def _draw_cart_pole(view) -> np.ndarray:
    limit = float(view["x_threshold"])
    canvas = _Canvas(-limit - 0.3, limit + 0.3, -0.5, 2.0)
    canvas.line([(-limit, 0), (limit, 0)], _GREY, 0.02)
    for end in (-limit, limit):
        canvas.line([(end, -0.15), (end, 0.15)], _RED, 0.03)
    x, theta, length = float(view["x"]), float(view["theta"]), 2.0 * float(view["length"])  # gymnax has half the length
    canvas.box((x, 0.0), 0.6, 0.3, _BLACK)
    canvas.rod((x, 0.1), (x + length * math.sin(theta), 0.1 + length * math.cos(theta)), _ORANGE, 0.12)
    canvas.disc((x, 0.1), 0.05, _BLUE)
    return canvas.frame()


def _draw_pendulum(view) -> np.ndarray:
    canvas = _Canvas(-1.3, 1.3, -1.3, 1.3)
    theta, torque = float(view["theta"]), float(view["last_u"]) / float(view["max_torque"])
    canvas.rod((0, 0), (-math.sin(theta), math.cos(theta)), _RED, 0.2)  # upright is 0
    canvas.disc((0, 0), 0.06, _BLACK)
    # Draw the torque as an arc that begins at the bottom.
    turn = np.linspace(0.0, torque * math.pi, 20)
    if abs(torque) > 0.01:
        canvas.line([(0.35 * math.sin(a), -0.35 * math.cos(a)) for a in turn], _BLUE, 0.04)
    return canvas.frame()


def _draw_mountain_car(view) -> np.ndarray:
    low, high, goal, x = (float(view[f"{name}position"]) for name in ("min_", "max_", "goal_", ""))

    def height(position):
        return 0.45 * math.sin(3.0 * position) + 0.55

    canvas = _Canvas(low, high, 0.0, 1.3)
    canvas.line([(p, height(p)) for p in np.linspace(low, high, 100)], _GREY, 0.015)
    canvas.line([(goal, height(goal)), (goal, height(goal) + 0.2)], _BLACK, 0.01)
    canvas.box((goal - 0.04, height(goal) + 0.17), 0.08, 0.06, _GREEN)
    canvas.disc((x, height(x) + 0.05), 0.05, _RED)
    canvas.disc((x, height(x) + 0.05), 0.02, _BLACK)
    return canvas.frame()


def _draw_acrobot(view) -> np.ndarray:
    first, second = float(view["link_length_1"]), float(view["link_length_2"])
    reach = first + second + 0.2
    canvas = _Canvas(-reach, reach, -reach, reach)
    canvas.line([(-reach, first), (reach, first)], _GREEN, 0.03)  # the tip must rise above this line
    inner = float(view["joint_angle1"])  # hanging down is 0
    outer = inner + float(view["joint_angle2"])
    elbow = first * math.sin(inner), -first * math.cos(inner)
    tip = elbow[0] + second * math.sin(outer), elbow[1] - second * math.cos(outer)
    canvas.rod((0, 0), elbow, _BLUE, 0.2)
    canvas.rod(elbow, tip, _ORANGE, 0.2)
    for joint in ((0.0, 0.0), elbow):
        canvas.disc(joint, 0.06, _BLACK)
    return canvas.frame()


register("gymnax:CartPole-v1", Drawing(_see, _draw_cart_pole, 50.0))
register("gymnax:Pendulum-v1", Drawing(_see, _draw_pendulum, 20.0))
register("gymnax:MountainCar-v0", Drawing(_see, _draw_mountain_car))
register("gymnax:MountainCarContinuous-v0", Drawing(_see, _draw_mountain_car))
register("gymnax:Acrobot-v1", Drawing(_see, _draw_acrobot, 15.0))
