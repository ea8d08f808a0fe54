"""Episodes as pictures: the right moments, drawn where the state says, and clear refusals."""

import base64
import json
import pickle
import re
import sys
import zlib
from functools import partial
from pathlib import Path

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from helpers.refused import raises, refused
from helpers.served import ServedFromHost
from PIL import Image

import jaxrl
from jaxrl.core import spaces
from jaxrl.core.errors import ConfigError, MissingExtraError
from jaxrl.core.schedules import resolve_schedules
from jaxrl.core.types import env_spec
from jaxrl.envs import drawings
from jaxrl.envs.episode import restart, transition
from jaxrl.envs.parameters import unwrapped
from jaxrl.networks import MLP, ActorCritic
from jaxrl.run.policies.policy import Policy
from jaxrl.run.recording import rendering


def untrained(env):
    env = jaxrl.envs.prepared(env)
    spec = env_spec(env)
    algo = resolve_schedules(jaxrl.PPO(network=ActorCritic(torso=MLP((8,)))).resolve(spec, 1), np.float32(0.0))
    return Policy(algo, algo.actor(algo.init(jax.random.key(1), spec)), spec)


@pytest.fixture(scope="module")
def cart_pole():
    env = jaxrl.make("gymnax:CartPole-v1")
    return untrained(env), env


def gif(path):
    picture = Image.open(path)
    frames = []
    for number in range(picture.n_frames):
        picture.seek(number)
        frames.append((np.asarray(picture.convert("RGB")), picture.info["duration"]))
    return frames


def test_a_picture_is_not_written_through_a_link(tmp_path):
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "a.gif").symlink_to("precious")
    rendering._write_gif(tmp_path / "a.gif", [Image.new("RGB", (2, 2))] * 2, 50.0)
    assert (tmp_path / "precious").read_text() == "precious"
    assert not (tmp_path / "a.gif").is_symlink() and len(gif(tmp_path / "a.gif")) >= 1


@pytest.mark.long
def test_a_gif_shows_one_episode_from_first_to_last_moment(cart_pole, tmp_path):
    policy, env = cart_pole
    path = rendering.render(policy, env, tmp_path / "new" / "a.gif", seed=3, max_steps=60)
    played = jaxrl.evaluate(policy.algo, policy.actor, env, policy.spec, seed=3, episodes=1)
    assert path == tmp_path / "new" / "a.gif"
    frames = gif(path)
    assert 1 < played.lengths[0] < 60
    assert len(frames) == played.lengths[0] + 1
    assert {duration for _, duration in frames[:-1]} == {20}  # the 0.02 s of the simulation
    assert frames[0][0].shape[2] == 3


@pytest.mark.long
def test_a_policy_is_shown_where_it_was_trained(cart_pole, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    untrained, env = cart_pole
    policy = Policy(untrained.algo, untrained.actor, untrained.spec, env)
    assert rendering.render(policy, max_steps=3) == Path("episode.gif")
    named = rendering.render(policy, env, "named.gif", max_steps=3)
    assert named.read_bytes() == Path("episode.gif").read_bytes()
    raises(
        ConfigError,
        "env=None.*'gymnax:CartPole-v1'",
        rendering.render,
        pickle.loads(pickle.dumps(policy)),
        path="a.gif",
    )


@pytest.mark.long
def test_a_longer_episode_is_cut_and_a_seed_is_an_episode(cart_pole, tmp_path):
    policy, env = cart_pole
    render = partial(rendering.render, policy, env, max_steps=4)
    first = gif(render(tmp_path / "a.gif", seed=0))
    again = gif(render(tmp_path / "b.gif", seed=0))
    other = gif(render(tmp_path / "c.gif", seed=1))
    assert len(first) == 5
    assert all(np.array_equal(a, b) for (a, _), (b, _) in zip(first, again, strict=True))
    assert any(not np.array_equal(a, b) for (a, _), (b, _) in zip(first, other, strict=True))


# --- drawings ------------------------------------------------------------------------------------------------------


def center(frame, color):
    """Mean (x, y) of the pixels near a color, y downwards, as fractions of the frame."""
    near = np.abs(frame.astype(int) - np.asarray(color)).sum(axis=-1) < 30
    assert near.any()
    y, x = np.nonzero(near)
    return x.mean() / frame.shape[1], y.mean() / frame.shape[0]


def drawn(name, **values):
    return drawings._DRAWINGS[name].draw({key: np.float32(value) for key, value in values.items()})


def test_the_pole_leans_where_the_angle_says():
    sees = {"x": 0.0, "length": 0.5, "x_threshold": 2.4}
    for theta in (-0.5, 0.0, 0.5):
        frame = drawn("gymnax:CartPole-v1", theta=theta, **sees)
        x, _ = center(frame, drawings._ORANGE)
        assert np.sign(round(x - 0.5, 2)) == np.sign(theta)
    right = drawn("gymnax:CartPole-v1", **(sees | {"x": 1.0}), theta=0.0)
    assert center(right, drawings._BLACK)[0] == pytest.approx(0.5 + 1.0 / 5.4, abs=0.01)


def test_pendulum_upright_at_zero_and_acrobot_hanging_at_zero():
    for theta, where in ((0.0, (0.5, 0.3)), (np.pi, (0.5, 0.7)), (np.pi / 2, (0.3, 0.5))):
        frame = drawn("gymnax:Pendulum-v1", theta=theta, last_u=0.0, max_torque=2.0)
        assert center(frame, drawings._RED) == pytest.approx(where, abs=0.05)
    sees = {"link_length_1": 1.0, "link_length_2": 1.0}
    hanging = drawn("gymnax:Acrobot-v1", joint_angle1=0.0, joint_angle2=0.0, **sees)
    folded = drawn("gymnax:Acrobot-v1", joint_angle1=0.0, joint_angle2=np.pi, **sees)
    assert center(hanging, drawings._ORANGE)[1] > 0.75 > center(folded, drawings._ORANGE)[1] + 0.05
    assert center(hanging, drawings._BLUE)[0] == pytest.approx(0.5, abs=0.02)


def test_the_car_climbs():
    sees = {"min_position": -1.2, "max_position": 0.6, "goal_position": 0.5}
    bottom = center(drawn("gymnax:MountainCar-v0", position=-0.5, **sees), drawings._RED)
    top = center(drawn("gymnax:MountainCar-v0", position=0.4, **sees), drawings._RED)
    assert top[0] > bottom[0] and top[1] < bottom[1]


def test_planes_show_the_first_plane_that_is_set():
    grid = np.zeros((10, 10, 4), bool)
    grid[2, 3, 1] = grid[2, 3, 3] = grid[9, 9, 3] = True
    frame = drawings.planes(grid)
    assert frame.shape == (240, 240, 3) and frame.dtype == np.uint8
    cells = frame[12::24, 12::24]
    assert tuple(cells[2, 3]) == tuple(drawings._PLANES[1])
    assert tuple(cells[9, 9]) == tuple(drawings._PLANES[3])
    assert len(np.unique(frame.reshape(-1, 3), axis=0)) == 3


def test_images_of_every_kind():
    gray = drawings.image(np.asarray([[0, 255], [128, 0]], np.uint8))
    assert gray.shape == (240, 240, 3) and tuple(gray[0, -1]) == (255, 255, 255) and tuple(gray[-1, 0]) == (128,) * 3
    color = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)
    assert np.array_equal(drawings.image(color)[::120, ::120], color)
    stack = np.stack([np.zeros((2, 2), np.uint8), np.full((2, 2), 9, np.uint8)], axis=-1)
    assert (drawings.image(stack) == 9).all()  # the newest
    assert tuple(drawings.image(np.full((2, 2, 3), 0.5, np.float32), (0.0, 1.0))[0, 0]) == (127, 127, 127)
    assert np.array_equal(drawings.image(np.ones((2, 2, 4), np.float32)), drawings.planes(np.ones((2, 2, 4))))


def test_minatar_is_drawn_from_its_state_under_any_wrapper():
    plain = jaxrl.make("gymnax:Breakout-MinAtar")
    wrapped = jaxrl.make("gymnax:Breakout-MinAtar", wrappers=(jaxrl.envs.FrameStack, jaxrl.envs.Flatten))
    key = jax.random.key(0)
    drawing = drawings._DRAWINGS["gymnax:Breakout-MinAtar"]
    _, observation = plain.reset(key)
    state, _ = wrapped.reset(key)
    base = unwrapped(wrapped)
    alone = jax.tree.structure(jax.eval_shape(base.reset, key)[0])
    found = rendering._part(state, alone)
    view = drawing.view(base, found, None)
    assert np.array_equal(drawing.draw(np.asarray(view)), drawings.planes(np.asarray(observation.observation)))


# --- an environment of one's own -----------------------------------------------------------------------------------


@struct.dataclass
class Lamp:
    """A picture that is brighter at every step; four steps."""

    name = "my:Lamp"
    observation_space = spaces.Box(0, 255, (6, 8, 1), np.uint8)
    action_space = spaces.Discrete(2)
    resets = False

    def reset(self, key):
        return jnp.zeros((), jnp.int32), restart(jnp.zeros((6, 8, 1), jnp.uint8))

    def step(self, state, action, key):
        state = state + 1
        observation = jnp.full((6, 8, 1), 60, jnp.uint8) * state.astype(jnp.uint8)
        return state, transition(observation, jnp.float32(1.0), state >= 4, jnp.asarray(False))


@pytest.mark.long
def test_images_are_drawn_as_observed_and_drawings_can_be_added(tmp_path):
    policy = untrained(Lamp())
    frames = [frame for frame, _ in gif(rendering.render(policy, Lamp(), tmp_path / "lamp.gif", max_steps=6))]
    assert [int(frame[0, 0, 0]) for frame in frames] == pytest.approx([0, 60, 120, 180, 240], abs=4)
    own = drawings.Drawing(
        lambda env, state, time_step: state, lambda view: np.full((40, 80, 3), 50 * int(view), np.uint8)
    )
    drawings.register("my:Lamp", own)
    try:
        frames = [frame for frame, _ in gif(rendering.render(policy, Lamp(), tmp_path / "own.gif", max_steps=6))]
    finally:
        del drawings._DRAWINGS["my:Lamp"]
    assert frames[0].shape == (56, 80, 3)
    assert [int(frame[0, 0, 0]) for frame in frames] == pytest.approx([0, 50, 100, 150, 200], abs=4)


# --- brax ----------------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_brax_is_a_page_with_every_moment(tmp_path):
    pytest.importorskip("brax")
    env = jaxrl.make("brax:inverted_pendulum", backend="spring")
    policy = untrained(env)
    page = rendering.render(policy, env, tmp_path / "pendulum.html", max_steps=3).read_text()
    packed = max(re.findall(r"[A-Za-z0-9+/=]{100,}", page), key=len)
    system = json.loads(zlib.decompress(base64.b64decode(packed)))
    assert len(system["states"]["x"]) == 4
    raises(ConfigError, r"end in \.html", rendering.render, policy, env, tmp_path / "pendulum.gif")


# --- refusals ------------------------------------------------------------------------------------------------------


def test_what_cannot_be_drawn_says_what_can(tmp_path):
    probe = jaxrl.make("probe:Constant")
    raises(ConfigError, "Acrobot-v1.*brax", rendering.render, untrained(probe), probe, tmp_path / "a.gif")
    assert list(tmp_path.iterdir()) == []


# --- environments that draw themselves -----------------------------------------------------------------------------


class Counts(gymnasium.Env):
    """Ends after seven steps; its picture is as bright as it has made steps, and as wide as no GIF should be."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}
    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (2,))
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, render_mode=None, blind=False):
        self.render_mode, self.blind = render_mode, blind

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(2, np.float32), {}

    def step(self, action):
        self.steps += 1
        return np.zeros(2, np.float32), 1.0, self.steps == 7, False, {}

    def render(self):
        assert self.render_mode == "rgb_array"
        return None if self.blind else np.full((300, 480, 3), 30 * self.steps, np.uint8)


@pytest.fixture
def counts():
    gymnasium.register("Counts-v0", Counts)
    yield "gymnasium:Counts-v0"
    del gymnasium.registry["Counts-v0"]


@pytest.mark.long
def test_an_environment_on_the_host_draws_itself(counts, tmp_path):
    env = jaxrl.make(counts)
    frames = gif(rendering.render(untrained(env), env, tmp_path / "a.gif"))
    assert [int(frame[75, 120, 0]) for frame, _ in frames] == [30 * step for step in range(8)]
    assert {frame.shape for frame, _ in frames} == {(150 + 16, 240, 3)} and frames[0][1] == 100
    short = gif(rendering.render(untrained(env), env, tmp_path / "b.gif", max_steps=3))
    assert len(short) == 4


def test_what_draws_nothing_on_the_host_is_told(counts, tmp_path):
    env = jaxrl.make(counts, blind=True)
    policy = untrained(env)
    raises(ConfigError, "Counts-v0 .*'rgb_array'", rendering.render, policy, env, tmp_path / "a.gif")
    refused(lambda: rendering.render(policy, env, tmp_path / "a.html"), "must end in .gif")
    served = ServedFromHost(jaxrl.make("gymnax:CartPole-v1"))
    refused(lambda: rendering.render(untrained(served), served, tmp_path / "a.gif"), "needs build_rendered")


@pytest.mark.long
def test_envpool_draws_the_episode_that_is_evaluated(tmp_path):
    pytest.importorskip("envpool")
    env = jaxrl.make("envpool:CartPole-v1")
    policy = untrained(env)
    played = jaxrl.evaluate(policy.algo, policy.actor, env, policy.spec, seed=3, episodes=1)
    path = rendering.render(policy, env, tmp_path / "a.gif", seed=3)
    count = int(played.lengths[0])
    assert len(gif(path)) == 1 + count // 2 + count % 2  # 30 a second are shown as 15, and the last one always
    assert path.stat().st_size < 2e6


@pytest.mark.long
def test_an_mp4_shows_the_frames_of_the_gif(cart_pole, tmp_path):
    av = pytest.importorskip("av")
    policy, env = cart_pole
    wanted = gif(rendering.render(policy, env, tmp_path / "it.gif", max_steps=20))
    path = rendering.render(policy, env, tmp_path / "it.mp4", max_steps=20)
    with av.open(path) as video:
        (stream,) = video.streams
        shown, rate = [frame.to_image() for frame in video.decode(stream)], float(stream.average_rate)
    assert rate == 1000 / wanted[0][1] and len(shown) == len(wanted) + rate
    assert path.stat().st_size < 2_000_000
    for number, (frame, _) in enumerate(wanted):
        found = np.asarray(shown[number], np.int32)
        assert np.abs(found - frame.astype(np.int32)[: found.shape[0], : found.shape[1]]).mean() < 3, number


def test_an_mp4_without_its_extra_says_how_to_get_it_before_playing(cart_pole, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)
    raises(MissingExtraError, r"jaxrl\[video\]", rendering.render, *cart_pole, tmp_path / "it.mp4")
    assert list(tmp_path.iterdir()) == []
