"""Rendering of a policy's episode as a GIF, an MP4 or, for brax, an interactive 3D page.

JAX environments are drawn from their states; host environments are drawn by their `render` methods.
"""

import contextlib
import math
import os
from collections.abc import Generator
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image, ImageDraw

from jaxrl import envs
from jaxrl.core import files, keys, ownership
from jaxrl.core.arguments import checked
from jaxrl.core.errors import ConfigError, JaxrlError, MissingExtraError
from jaxrl.core.host_types import RenderedRecipe
from jaxrl.core.interrupts import interruptible
from jaxrl.core.limits import checked_seed
from jaxrl.core.matching import check_spaces
from jaxrl.core.types import Environment, EnvSpec, HostRecipe, PyTree, num_agents
from jaxrl.envs.drawings import Drawing, drawing_of
from jaxrl.envs.env_registry import EnvironmentLike
from jaxrl.envs.parameters import unwrapped
from jaxrl.parallel import rollout as ro
from jaxrl.parallel.host_rollout import HostSteps, complete, in_this_thread, unroll
from jaxrl.run.policies.policy import Policy

_CAPTION = 16  # height in pixels of the caption below every frame
_SIDE = 240  # maximum width and height in pixels of a host environment's frame
_MOST_A_SECOND = 20  # maximum frames per second of a host environment, because drawing is slow


@interruptible
@checked(max_steps={"low": 1})
def render(
    policy: Policy,
    env: EnvironmentLike | None = None,
    path: str | os.PathLike | None = None,
    *,
    seed: int = 0,
    max_steps: int = 500,
    explore: bool = False,
) -> Path:
    """Play one episode and write it to `path` as a GIF or MP4, or for brax as an HTML page.

    The JAX environments that can be drawn are CartPole, Pendulum, both MountainCars, Acrobot and MinAtar of gymnax,
    every brax environment, all environments with image observations, and those registered with
    `jaxrl.envs.drawings.register`. A brax page loads its viewer from the network when it is opened. Environments of
    Gymnasium and EnvPool are drawn by their `render` methods, which may need packages (pygame for classic control).

    Args:
      policy: the policy of a `Result`, or from `jaxrl.load`.
      env: an environment from `jaxrl.make`, or its name, with the spaces that the policy was trained on. None: the
        training environment.
      path: the file to write, ending in ".gif", or ".mp4" with `jaxrl[video]` (brax: ".html"); directories are created,
        and a file that jaxrl wrote is replaced. None: episode.gif or episode.html in the working directory.
      seed: seed of the episode, which is the first episode of `evaluate(..., seed=seed)`.
      max_steps: maximum length of the episode; a longer episode is cut off.
      explore: sample actions as in training, instead of taking the best ones.

    Returns:
      The path.

    Raises:
      ConfigError: the environment cannot be drawn (the message names those that can), is unknown, or has other spaces
        than that of the policy; or the path has another suffix, or is a file that jaxrl did not write.
      MissingExtraError: the file is an MP4, and `jaxrl[video]` is not installed.
    """
    where = policy.env if env is None else env
    if where is None:
        raise ConfigError(f"env=None, but an unpickled policy has no environment; pass {policy.spec.name!r} or similar")
    env = envs.prepared(where)
    seed = checked_seed("seed", seed)
    check_spaces(policy.spec, env)
    path = _checked_path(f"episode{suffix_of(env)}" if path is None else path, env)
    if isinstance(env, Environment):
        drawing = _drawing(env)
        views, returns = _episode(policy, env, drawing, seed, max_steps, explore)
        if drawing is _BRAX:
            path.parent.mkdir(parents=True, exist_ok=True)
            with files.replacing(path) as file:
                file.write(f"{_brax_page(unwrapped(env), views)}\n<!-- {ownership.MARK} -->\n")
            return path
        frames = [_captioned(drawing.draw(v), n, returns[n]) for n, v in enumerate(views)]
        per_second = drawing.frames_per_second
    else:
        frames, per_second = _host_episode(policy, env, seed, max_steps, explore)
    path.parent.mkdir(parents=True, exist_ok=True)
    (_write_mp4 if path.suffix.lower() == ".mp4" else _write_gif)(path, frames, per_second)
    return path


def suffix_of(env: Environment | HostRecipe) -> str:
    """Return the suffix of an environment's episode files: ".gif", or ".html" for brax."""
    return ".html" if isinstance(env, Environment) and unwrapped(env).name.startswith("brax:") else ".gif"


def check_drawable(env: Environment | HostRecipe, spec: EnvSpec) -> None:
    """Check that `render` can draw `env`; for a host environment, draw it once.

    Raises:
      ConfigError: the environment cannot be drawn, or its spaces differ from those of `spec`.
    """
    check_spaces(spec, env)
    if isinstance(env, Environment):
        _drawing(env)
        return
    host = _built(env, 0)
    try:
        _photographed(host, host.reset(), 0)
    finally:
        host.close()


def _drawing(env):
    base = unwrapped(env)
    if base.name == "brax:fast":
        raise ConfigError("brax:fast cannot be drawn, because it has no bodies; use another brax environment")
    return _BRAX if suffix_of(env) == ".html" else drawing_of(base, env.observation_space)


def _checked_path(path, env):
    path, ending = files.expand(path), suffix_of(env)
    if ending == ".gif" and path.suffix.lower() == ".mp4":
        _av()
    elif path.suffix.lower() != ending:
        name = unwrapped(env).name if isinstance(env, Environment) else env.name
        other = " or .mp4" if ending == ".gif" else ""
        raise ConfigError(f"path={str(path)!r} must end in {ending}{other} for {name}")
    ownership.check_output(path, path.suffix.lower()[1:])
    return path


def _part(state: PyTree, structure: Any) -> PyTree:
    """Return the part of `state` with the tree structure `structure`; states of wrappers contain the wrapped state."""

    def found(part):
        return jax.tree.structure(part) == structure

    return next(part for part in jax.tree.leaves(state, is_leaf=found) if found(part))


# --- the episode -------------------------------------------------------------------------------------------------


def _episode(policy, env, drawing, seed, max_steps, explore) -> tuple[list[PyTree], np.ndarray]:
    """Play one episode; return the view of every time step, as numpy arrays, and the return up to this time step."""
    key = keys.evaluation_key(keys.root_key(seed))
    played = _play(
        policy.algo, policy.actor, env, key, spec=policy.spec, view=drawing.view, length=max_steps + 1, explore=explore
    )
    views, returns, last = jax.device_get(played)
    count = int(np.argmax(last)) + 1 if last.any() else max_steps + 1
    return [jax.tree.map(lambda x, n=n: x[n], views) for n in range(count)], returns[:count]


@partial(jax.jit, static_argnames=("spec", "view", "length", "explore"))
def _play(algo, actor, env, key, *, spec, view, length, explore):
    """Return the views, returns and ends of `length` time steps, which may continue after the end of the episode."""
    base = unwrapped(env)
    alone = jax.tree.structure(jax.eval_shape(base.reset, key)[0])
    index = jnp.arange(num_agents(env), dtype=jnp.int32)
    env_roots, act_roots = keys.environment_keys(key, index), keys.policy_keys(key, index)
    tick = jnp.uint32(0)
    step_keys = keys.tick_keys(env_roots, tick, length), keys.tick_keys(act_roots, tick, length)

    def seen(acting):
        state, timestep = jax.tree.map(lambda x: x[0], (_part(acting.env_state, alone), acting.timestep))
        complete = timestep.episode.complete  # None: the agents have separate episodes
        return view(base, state, timestep), timestep.episode.returns, timestep.last if complete is None else complete

    def step(acting, step_keys):
        now = jax.tree.map(lambda x: x[None], step_keys)
        following, _ = ro.unroll(algo, actor, env, acting, now, spec=spec, explore=explore)
        return following, seen(acting)

    return jax.lax.scan(step, ro.begin(algo, env, env_roots, index, spec=spec, num_envs=len(index)), step_keys)[1]


def _built(env, seed):
    """Return a single host environment that can be rendered."""
    if not isinstance(env, RenderedRecipe):
        raise ConfigError(
            f"{env.name} cannot be drawn; its recipe needs build_rendered (jaxrl.core.host_types.RenderedRecipe)"
        )
    with _drawing_with(env):
        return env.build_rendered(keys.evaluation_seed(seed))


@contextlib.contextmanager
def _drawing_with(host: Any) -> Generator[None]:
    """Convert any error of a host environment, such as a missing package or display, to a `ConfigError`."""
    try:
        yield
    except JaxrlError:
        raise
    except Exception as error:
        raise ConfigError(f"{host.name} cannot be drawn: {type(error).__name__}: {error}") from error


def _host_episode(policy, env, seed, max_steps, explore) -> tuple[list[Image.Image], float]:
    """Return the frames of one episode in a host environment, and the frames per second."""
    host = _built(env, seed)
    steps, key = HostSteps(policy.spec, 1, 1, 1, explore), keys.evaluation_key(keys.root_key(seed))
    try:
        # Draw fewer frames if the environment has more than _MOST_A_SECOND frames per second.
        every = max(1, math.ceil(host.frames_per_second / _MOST_A_SECOND))
        acting = steps.begin(policy.algo, host.reset(), key, jnp.zeros((1,), jnp.int32))
        frames = [_photographed(host, acting.timestep, 0)]
        for number in range(1, max_steps + 1):
            complete(unroll(steps, policy.algo, policy.actor, acting, in_this_thread(host.step)))
            ended = bool(acting.timestep.last[0])
            if ended or number % every == 0:
                frames.append(_photographed(host, acting.timestep, number))
            if ended:
                break
        return frames, host.frames_per_second / every
    finally:
        host.close()


def _photographed(host, timestep, number) -> Image.Image:
    """Return a picture of a host environment, at most `_SIDE` pixels high and wide."""
    with _drawing_with(host):
        frame = host.render()
    if frame is None or frame.ndim != 3:
        raise ConfigError(f"{host.name} cannot be drawn, because it has no render mode 'rgb_array'")
    picture = Image.fromarray(np.ascontiguousarray(frame))
    picture.thumbnail((_SIDE, _SIDE), Image.Resampling.BOX)
    return _captioned(np.asarray(picture), number, timestep.episode.returns[0])


# --- files -------------------------------------------------------------------------------------------------------


def _captioned(frame: np.ndarray, step: int, episode_return: float) -> Image.Image:
    height, width = frame.shape[:2]
    picture = Image.new("RGB", (width, height + _CAPTION), (255, 255, 255))
    picture.paste(Image.fromarray(np.ascontiguousarray(frame)), (0, 0))
    ImageDraw.Draw(picture).text((3, height + 2), f"step {step}   return {episode_return:.4g}", (60, 60, 60))
    return picture


def _av():
    try:
        import av
    except ImportError as error:
        raise MissingExtraError("MP4", "video") from error
    return av


def _write_mp4(path: Path, frames: list[Image.Image], per_second: float) -> None:
    width, height = (size - size % 2 for size in frames[0].size)  # 4:2:0 subsampling needs even sizes
    frames = frames + frames[-1:] * round(per_second)  # pause at the end
    with files.replacing(path, "wb") as file, _av().open(file, "w", format="mp4") as video:
        video.metadata["comment"] = ownership.MARK
        stream = video.add_stream("libx264", rate=Fraction(per_second).limit_denominator(1000))
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for frame in frames:
            pixels = np.ascontiguousarray(np.asarray(frame.convert("RGB"))[:height, :width])
            video.mux(stream.encode(_av().VideoFrame.from_ndarray(pixels, format="rgb24")))
        video.mux(stream.encode())


def _write_gif(path: Path, frames: list[Image.Image], per_second: float) -> None:
    # GIF durations are in hundredths of a second, and viewers slow down frames that are shorter than two hundredths.
    hundredths = max(2, round(100 / per_second))
    durations = [10 * hundredths] * (len(frames) - 1) + [1000]  # pause at the end
    first, *others = (frame.quantize(64, dither=Image.Dither.NONE) for frame in frames)
    with files.replacing(path, "wb") as file:
        first.save(file, "GIF", save_all=True, append_images=others, duration=durations, loop=0, comment=ownership.MARK)


_BRAX = Drawing(lambda env, state, time_step: state.own.pipeline_state, lambda view: view)


def _brax_page(base: Any, states: list[PyTree]) -> str:
    from brax.envs.base import PipelineEnv
    from brax.io import html

    env = base.foreign
    assert isinstance(env, PipelineEnv)  # true for all environments of brax
    system = env.sys.tree_replace({**base.system, "opt.timestep": env.dt})
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return html.render(system, states)
