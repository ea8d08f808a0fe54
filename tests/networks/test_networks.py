"""Actor-critic and Q-network: structure, unrolling, inputs, masks, and that every field changes the program."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.refused import raises

from jaxrl.algos.rnd import RND
from jaxrl.core import spaces
from jaxrl.core.errors import ConfigError
from jaxrl.core.types import EnvSpec, NetworkInputs, TimeStep
from jaxrl.networks import (
    GRU,
    LSTM,
    MLP,
    ActionValues,
    Actor,
    ActorCritic,
    Categorical,
    Critic,
    DiagonalGaussian,
    Embedding,
    Joint,
    ModelNetwork,
    MultiCategorical,
    QNetwork,
    TanhGaussian,
)

T, B = 5, 3
SMALL = MLP((4,))
VECTOR = spaces.Box(-1, 1, (3,))
DISCRETE = EnvSpec("discrete", VECTOR, spaces.Discrete(4))
MULTI = EnvSpec("multi", VECTOR, spaces.MultiDiscrete((2, 3)))
BOX = EnvSpec("box", VECTOR, spaces.Box(-2, 2, (2,)))
PARTS = spaces.Dict(
    {
        "amount": spaces.Box(-2, 2, (2,)),
        "choice": spaces.Tuple((spaces.Discrete(4), spaces.MultiDiscrete((2, 3)), spaces.Box(0, 1, (1,)))),
    }
)
COMPOSITE = EnvSpec("composite", VECTOR, PARTS)


@dataclasses.dataclass(frozen=True)
class OwnTorso:
    def build(self, space, rngs):
        return MLP((4,)).build(space, rngs)


def inputs(spec, length=T, batch=B, *, mask=None, seed=0):
    rng = np.random.default_rng(seed)
    shape = (length, batch)
    flags = jnp.zeros(shape, bool)
    first = flags.at[0, 0].set(True)
    if length > 3:
        first = first.at[3, 1].set(True)
    action = spaces.zeros(spec.action_space)
    return NetworkInputs(
        observation=jnp.asarray(rng.normal(size=(*shape, 3)), jnp.float32),
        previous_reward=jnp.asarray(rng.normal(size=shape), jnp.float32),
        first=first,
        action_mask=mask,
        previous_action=jax.tree.map(lambda x: jnp.ones((*shape, *x.shape), x.dtype), action),
    )


def batched(carry, batch=B):
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (batch, *x.shape)), carry)


def shapes_of(network, spec):
    """The shapes of its parameters and of its model state."""
    return jax.eval_shape(lambda key: network.init(key, spec), jax.random.key(0))


def random_params(network, spec):
    """Of the right structure, biases not zero, and nothing to compile."""
    rng = np.random.default_rng(0)
    shapes, _ = shapes_of(network, spec)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape) * 0.5, x.dtype), shapes)


def evaluate(network, params, read, carry, spec):
    """Outputs and the next carry of a network without model state."""
    return network.apply(params, read, carry, spec=spec, model_state=(), train=False)[:2]


def run(network, spec, timesteps):
    params = random_params(network, spec)
    apply = jax.jit(lambda p, t, c: evaluate(network, p, t, c, spec))
    return params, apply, apply(params, timesteps, batched(network.initial_carry(spec), timesteps.first.shape[1]))


def close(a, b, atol=1e-6):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=atol), a, b)


# --- structure -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("core", [None, GRU(4)])
@pytest.mark.parametrize("shared", [False, True])
def test_params_are_a_plain_dict_with_the_agreed_keys(shared, core):
    network = ActorCritic(SMALL, core, shared)
    params, model_state = shapes_of(network, BOX)
    assert model_state == ()
    assert set(params) == ({"torso", "policy", "value"} if shared else {"policy", "value"})

    def plain(tree):
        if isinstance(tree, dict):
            assert type(tree) is dict and all(isinstance(key, str) for key in tree)
            return all(plain(child) for child in tree.values())
        return tree.dtype == jnp.float32

    assert plain(params)
    policy = params["policy"] if shared else params["policy"]["head"]
    assert policy["log_std"].shape == (2,)
    cores = [
        path for path, _ in jax.tree_util.tree_leaves_with_path(params) if "recurrent" in jax.tree_util.keystr(path)
    ]
    assert len(cores) == (0 if core is None else 1 if shared else 2)


def test_same_key_same_params_and_initial_values():
    network = ActorCritic(SMALL, initial_log_std=-0.5, policy_gain=0.5, value_gain=2.0)
    one, two, other = (network.init(jax.random.key(k), BOX)[0] for k in (0, 0, 1))
    jax.tree.map(np.testing.assert_array_equal, one, two)
    kernel = one["policy"]["head"]["output"]["kernel"]
    assert not np.allclose(kernel, other["policy"]["head"]["output"]["kernel"])
    np.testing.assert_allclose(kernel.T @ kernel, 0.25 * np.eye(2), atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(one["value"]["head"]["output"]["kernel"]), 2.0, rtol=1e-5)
    np.testing.assert_array_equal(one["policy"]["head"]["log_std"], [-0.5, -0.5])
    policy, value = (one[part]["body"]["torso"]["dense"]["layer_0"]["kernel"] for part in ("policy", "value"))
    assert not np.allclose(policy, value)


def test_descriptions_are_values():
    one, two = (ActorCritic(MLP([4, 4]), GRU(3)) for _ in range(2))
    assert one == two and hash(one) == hash(two) and one != dataclasses.replace(one, core=LSTM(3))
    assert {QNetwork(): 1}[QNetwork()] == 1


@pytest.mark.long
@pytest.mark.parametrize(
    ("spec", "network", "kind", "action"),
    [
        (DISCRETE, ActorCritic(SMALL), Categorical, ((), jnp.int32)),
        (MULTI, ActorCritic(SMALL), MultiCategorical, ((2,), jnp.int32)),
        (BOX, ActorCritic(SMALL), DiagonalGaussian, ((2,), jnp.float32)),
        (BOX, ActorCritic(SMALL, continuous="tanh"), TanhGaussian, ((2,), jnp.float32)),
        (BOX, ActorCritic(SMALL, state_dependent_std=True), DiagonalGaussian, ((2,), jnp.float32)),
    ],
)
def test_outputs_for_every_action_space(spec, network, kind, action):
    @jax.jit
    def everything(params, key, timesteps):
        output, carry = evaluate(network, params, timesteps, (), spec)
        drawn = output.distribution.sample(jax.random.split(key, (T, B)))
        return output, drawn, output.distribution.log_prob(drawn), carry

    output, drawn, log_prob, carry = everything(random_params(network, spec), jax.random.key(0), inputs(spec))
    assert type(output.distribution) is kind
    assert output.value.shape == log_prob.shape == (T, B) and np.all(np.isfinite(log_prob))
    assert (drawn.shape, drawn.dtype) == ((T, B, *action[0]), action[1])
    assert carry == ()
    assert all(leaf.shape[:2] == (T, B) for leaf in jax.tree.leaves(output))


@pytest.mark.long
@pytest.mark.parametrize("continuous", ["gaussian", "tanh"])
@pytest.mark.parametrize("state_dependent_std", [False, True])
def test_actions_of_several_parts_have_a_head_each(continuous, state_dependent_std):
    network = ActorCritic(SMALL, continuous=continuous, state_dependent_std=state_dependent_std)
    shapes, _ = shapes_of(network, COMPOSITE)
    assert sorted(shapes["policy"]["head"]) == ["part_amount", "part_choice"]
    assert sorted(shapes["policy"]["head"]["part_choice"]) == ["part_0", "part_1", "part_2"]
    mask = {"choice": (jnp.zeros((T, B, 4), bool).at[..., 2].set(True), None, None)}

    @jax.jit
    def everything(params, key, timesteps):
        output, _ = evaluate(network, params, timesteps, (), COMPOSITE)
        drawn = output.distribution.sample(jax.random.split(key, (T, B)))
        return output, drawn, output.distribution.log_prob(drawn), output.distribution.entropy()

    read = inputs(COMPOSITE, mask=mask)
    output, drawn, log_prob, entropy = everything(random_params(network, COMPOSITE), jax.random.key(0), read)
    assert isinstance(output.distribution, Joint) and log_prob.shape == entropy.shape == (T, B)
    assert np.all(np.isfinite(log_prob)) and np.all(np.isfinite(entropy))
    zeros = spaces.zeros(PARTS)
    jax.tree.map(
        lambda x, like: np.testing.assert_equal((x.shape[2:], x.dtype), (like.shape, like.dtype)), drawn, zeros
    )
    kind = DiagonalGaussian if continuous == "gaussian" else TanhGaussian
    assert [type(part) for part in output.distribution.leaves] == [kind, Categorical, MultiCategorical, kind]
    np.testing.assert_array_equal(drawn["choice"][0], 2, err_msg="the only one that its mask allows")
    assert len(np.unique(drawn["choice"][1])) > 1, "None allows everything"
    assert all(leaf.shape[:2] == (T, B) for leaf in jax.tree.leaves(output))


ALLOWED = jnp.ones((T, B, 4), bool)


@pytest.mark.parametrize(
    ("mask", "said"),
    [
        (ALLOWED, r"mask has an array of shape \(5, 3, 4\), but the space has the parts \['amount', 'choice'\]"),
        (
            {"chioce": (ALLOWED, None, None)},
            r"mask has the parts \['chioce'\], which .* parts are \['amount', 'choice'\]",
        ),
        ({"choice": (ALLOWED, None)}, r"a tuple of length 2, but the space has the parts \[0, 1, 2\]"),
        ({"choice": (ALLOWED[..., :1], None, None)}, r"mask of Discrete.*\(5, 3, 1\); it must be \[..., 4\], or None"),
        ({"choice": ({"a": ALLOWED}, None, None)}, r"mask of Discrete.*\{'a': \(5, 3, 4\)\}; it must be \[..., 4\]"),
        ({"amount": ALLOWED}, r"mask of Box.*\(5, 3, 4\); it must be None"),
    ],
)
def test_masks_that_are_not_like_the_action_are_refused(mask, said):
    network = ActorCritic(SMALL)
    shapes, _ = shapes_of(network, COMPOSITE)
    raises(
        ConfigError,
        said,
        jax.eval_shape,
        lambda params: evaluate(network, params, inputs(COMPOSITE, mask=mask), (), COMPOSITE),
        shapes,
    )


def test_actions_that_have_no_policy_are_refused():
    for space in (spaces.Dict({}), spaces.Tuple((spaces.Discrete(2), spaces.Box(0, 3, (2,), np.int32)))):
        with pytest.raises(ConfigError, match="no policy for the action space"):
            ActorCritic(SMALL).init(jax.random.key(0), EnvSpec("odd", VECTOR, space))


def test_the_previous_action_is_read_part_by_part():
    network, read = ActorCritic(SMALL, previous_action=True), inputs(COMPOSITE)
    read = read.replace(first=read.first & False)
    params, apply, (before, _) = run(network, COMPOSITE, read)
    leaves, structure = jax.tree.flatten(read.previous_action)
    for i in range(len(leaves)):
        changed = jax.tree.unflatten(structure, [x * 0 if j == i else x for j, x in enumerate(leaves)])
        after, _ = apply(params, read.replace(previous_action=changed), ())
        assert not np.allclose(before.value, after.value)


# --- time ----------------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("network", [ActorCritic(SMALL, GRU(4)), ActorCritic(SMALL, LSTM(4), shared=True)])
def test_unroll_is_single_steps_and_resets(network):
    timesteps = inputs(DISCRETE)
    params, apply, (whole, after) = run(network, DISCRETE, timesteps)
    start = batched(network.initial_carry(DISCRETE))
    carry = start
    for t in range(T):
        output, carry = apply(params, jax.tree.map(lambda x, t=t: x[t : t + 1], timesteps), carry)
        close(jax.tree.map(lambda x: x[0], output), jax.tree.map(lambda x, t=t: x[t], whole))
    close(carry, after)
    # Environment 1 begins an episode at row 3: the rest is as if it had been started there by hand.
    late, _ = apply(params, jax.tree.map(lambda x: x[3:], timesteps.replace(first=timesteps.first * False)), start)
    close(late.value[:, 1], whole.value[3:, 1])
    assert not np.allclose(late.value[:, 2], whole.value[3:, 2])
    values = jax.jit(lambda p: network.value(p, timesteps, start, spec=DISCRETE, model_state=()))(params)
    close(values, whole.value)


def test_value_alone_leaves_the_policy_out():
    """Half the matrix products, and the same numbers."""
    network = ActorCritic(SMALL)
    timesteps = inputs(DISCRETE)
    params, apply, (output, _) = run(network, DISCRETE, timesteps)
    alone = jax.jit(lambda p: network.value(p, timesteps, (), spec=DISCRETE, model_state=()))
    close(alone(params), output.value)
    assert str(jax.make_jaxpr(alone)(params)).count("dot_general") == 2
    gradient = jax.grad(lambda p: jnp.sum(alone(p)))(params)
    assert all(np.all(np.asarray(leaf) == 0) for leaf in jax.tree.leaves(gradient["policy"]))


@pytest.mark.parametrize("batch", [64, 2048])
def test_the_compiled_program_is_the_bare_products(batch):
    """CartPole's network costs what a hand-written one does, by XLA's own count."""
    spec = EnvSpec("cartpole", spaces.Box(-1, 1, (4,)), spaces.Discrete(2))
    network = ActorCritic(MLP((64, 64)))
    params, _ = shapes_of(network, spec)
    observation = jax.ShapeDtypeStruct((1, batch, 4), jnp.float32)
    flags = jnp.zeros((1, batch), bool)

    def ours(params, observation):
        timesteps = TimeStep(observation, jnp.zeros((1, batch)), flags, flags, flags)
        output, _ = evaluate(network, params, NetworkInputs.of_timesteps(timesteps), (), spec)
        return output.distribution.logits, output.value

    def by_hand(params, x):
        def branch(p, x):
            for layer in ("layer_0", "layer_1"):
                weights = p["body"]["torso"]["dense"][layer]
                x = jnp.tanh(x @ weights["kernel"] + weights["bias"][None])
            return x @ p["head"]["output"]["kernel"] + p["head"]["output"]["bias"][None]

        return branch(params["policy"], x[0])[None], branch(params["value"], x[0])[None, :, 0]

    costs = [jax.jit(f).lower(params, observation).compile().cost_analysis() for f in (ours, by_hand)]
    for measure in ("flops", "transcendentals", "bytes accessed"):
        assert costs[0][measure] == pytest.approx(costs[1][measure], rel=0.01), measure


# --- inputs --------------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("network", [ActorCritic(SMALL), QNetwork(SMALL)])
def test_previous_action_and_reward_are_seen_only_if_wanted(network):
    base = inputs(DISCRETE)
    others = {
        "previous_action": base.replace(previous_action=base.previous_action + 1),
        "previous_reward": base.replace(previous_reward=base.previous_reward + 1.0),
    }

    def outputs(result):
        return np.asarray(result[0].value if isinstance(network, ActorCritic) else result[0])

    for wanted in others:
        seeing = dataclasses.replace(network, **{wanted: True})
        params, apply, reference = run(seeing, DISCRETE, base)
        for field, timesteps in others.items():
            changed = ~np.isclose(outputs(apply(params, timesteps, ())), outputs(reference)).reshape(T, B, -1).any(-1)
            if field != wanted:
                assert not changed.any()
            elif wanted == "previous_action":  # nothing came before an episode's first observation
                np.testing.assert_array_equal(changed, ~np.asarray(base.first))
            else:
                assert changed.all()


@pytest.mark.parametrize(
    ("network", "required"),
    [
        (ActorCritic(SMALL), ()),
        (QNetwork(SMALL, previous_reward=True), ("previous_reward",)),
        (QNetwork(SMALL, previous_action=True), ("previous_action", "first")),
        (ActorCritic(SMALL, GRU(2)), ("first",)),
    ],
)
def test_what_a_network_requires_is_what_it_reads(network, required):
    """It runs on that alone, and not without any of it."""
    assert network.requires == {"observation", *required}
    params, every = random_params(network, DISCRETE), inputs(DISCRETE)
    least = NetworkInputs(**{name: getattr(every, name) for name in network.requires})
    carry = batched(network.initial_carry(DISCRETE))
    close(evaluate(network, params, least, carry, DISCRETE), evaluate(network, params, every, carry, DISCRETE))
    for name in required:
        raises(ConfigError, f"reads {name}", evaluate, network, params, least.replace(**{name: None}), carry, DISCRETE)


STATES = spaces.Dict({"state": VECTOR, "privileged_state": spaces.Box(-1, 1, (2,))})
BOTH = ("privileged_state", "state")


def states(seed=0):
    rng = np.random.default_rng(seed)
    observation = {name: jnp.asarray(rng.normal(size=(T, B, *x.shape)), jnp.float32) for name, x in STATES.items}
    return NetworkInputs(observation)


def test_policy_and_value_may_read_different_keys_of_the_observation():
    spec = EnvSpec("states", STATES, spaces.Discrete(4))
    network = ActorCritic(SMALL, policy_observation_keys=("state",), value_observation_keys=["privileged_state"])
    params, apply, (output, _) = run(network, spec, states().replace(first=jnp.zeros((T, B), bool)))
    assert params["policy"]["body"]["torso"]["dense"]["layer_0"]["kernel"].shape[0] == 3
    assert params["value"]["body"]["torso"]["dense"]["layer_0"]["kernel"].shape[0] == 2
    other = states().observation | {"privileged_state": states(1).observation["privileged_state"]}
    changed, _ = apply(params, states().replace(observation=other), ())
    close(changed.distribution, output.distribution)
    assert not np.isclose(changed.value, output.value).any()
    several = ActorCritic(policy_observation_keys=("state",), value_observation_keys=BOTH)
    _, _, (output, _) = run(several, spec, states().replace(first=jnp.zeros((T, B), bool)))
    assert output.value.shape == (T, B)


@pytest.mark.parametrize("shared", [True, False])
def test_heads_may_have_dense_layers_of_their_own(shared):
    network = ActorCritic(SMALL, shared=shared, head_widths=(5, 6))
    spec, timesteps = DISCRETE, inputs(DISCRETE)
    params, _, (output, _) = run(network, spec, timesteps)

    def affine(layer, x):
        return np.asarray(x) @ np.asarray(layer["kernel"]) + np.asarray(layer["bias"])

    for name, found in (("policy", output.distribution.logits), ("value", output.value)):
        body, head = (params["torso"], params[name]) if shared else (params[name]["body"], params[name]["head"])
        x = np.tanh(affine(body["torso"]["dense"]["layer_0"], timesteps.observation))
        for layer in ("layer_0", "layer_1"):
            x = np.maximum(affine(head["hidden"][layer], x), 0)
        expected = affine(head["output"]["output"], x)
        close(found, expected if name == "policy" else expected[..., 0], atol=1e-5)


@pytest.mark.parametrize("core_of", ["policy", "value"])
def test_policy_or_value_alone_may_have_the_core(core_of):
    spec, inputs = EnvSpec("vector", VECTOR, spaces.Discrete(4)), states().replace(first=jnp.zeros((T, B), bool))
    inputs = inputs.replace(observation=inputs.observation["state"])
    network = ActorCritic(SMALL, core=GRU(4), core_of=core_of)
    params, apply, (output, carry) = run(network, spec, inputs)
    other = {"policy": "value", "value": "policy"}[core_of]
    assert "core" in params[core_of]["body"] and "core" not in params[other]["body"]
    assert carry[core_of].shape == (B, 4) and carry[other] == ()
    # What was seen first changes what is said last by the one that remembers alone.
    changed, _ = apply(
        params, inputs.replace(observation=inputs.observation.at[0].add(1.0)), batched(network.initial_carry(spec), B)
    )
    same = {"policy": close, "value": close} | {
        core_of: lambda a, b: np.testing.assert_raises(AssertionError, close, a, b)
    }
    same["policy"](changed.distribution.logits[-1], output.distribution.logits[-1])
    same["value"](changed.value[-1], output.value[-1])


@pytest.mark.parametrize("make", [Actor, ActorCritic, Critic, Embedding, ModelNetwork, QNetwork, RND])
def test_parts_of_a_network_are_networks(make):
    """The kinds of all parts of all networks: what has too little, a class, another part, and None where one must be.

    A user's own part may be of any class that has what the protocol asks for.
    """
    wrong = {"torso": (3, MLP, GRU(4), None), "core": ("gru", MLP(), LSTM, None), "head": (1.0, MLP(), None)}
    fields = {"torso": "torso", "trunk": "torso", "core": "core", "head": "head"}
    found = [field for field in dataclasses.fields(make) if field.name in fields]
    assert found
    for field in found:
        kind, optional = fields[field.name], field.name != "head"
        for value in wrong[kind][:-1] if optional else wrong[kind]:
            with pytest.raises(ConfigError) as raised:
                make(**{field.name: value})
            [problem] = raised.value.problems
            assert problem.startswith(f"{make.__name__}.{field.name}={value!r} is not a {kind}; pass one of")
            assert {"torso": "MLP(...)", "core": "GRU(...)", "head": "ActionValues(...)"}[kind] in problem
            assert problem.endswith(", or None") == optional
        if kind == "torso":
            assert getattr(make(**{field.name: OwnTorso()}), field.name) == OwnTorso()
    raises(ConfigError, f"{make.__name__}.torso=3", dataclasses.replace, make(), torso=3)


def test_a_core_of_nothing_is_refused():
    for wrong in ({"core_of": "actor"}, {"core_of": "policy"}, {"core_of": "value", "core": GRU(4), "shared": True}):
        raises(ConfigError, "core_of", ActorCritic, SMALL, **wrong)


def test_masks_are_not_required_and_a_network_of_statistics_trains_them():
    """In training a batch is normalized by itself; its statistics move those of the model state, as flax says."""
    network = QNetwork(MLP((4,), activation="identity", normalization="batch"))
    params, state = network.init(jax.random.key(0), DISCRETE)
    assert set(jax.tree.leaves(jax.tree.map(lambda x: x.shape, state), is_leaf=lambda x: type(x) is tuple)) == {(4,)}
    read = inputs(DISCRETE)

    def apply(state, train):
        return network.apply(params, read, (), spec=DISCRETE, model_state=state, train=train)

    values, _, trained = apply(state, True)
    dense = jax.tree.map(np.asarray, params["torso"]["torso"]["dense"]["layer_0"])
    hidden = np.asarray(read.observation) @ dense["kernel"] + dense["bias"]
    mean, variance = hidden.mean((0, 1)), hidden.var((0, 1))
    head = jax.tree.map(np.asarray, params["head"]["advantage"]["output"])
    close(values, ((hidden - mean) / np.sqrt(variance + 1e-5)) @ head["kernel"] + head["bias"], 1e-4)
    statistics = trained["torso"]["torso"]["dense"]["norm_0"]
    close(statistics, {"mean": 0.01 * mean, "var": 0.99 + 0.01 * variance}, 1e-5)
    values, _, kept = apply(trained, False)
    close(kept, trained, 0.0)
    mean, variance = (np.asarray(statistics[name]) for name in ("mean", "var"))
    close(values, ((hidden - mean) / np.sqrt(variance + 1e-5)) @ head["kernel"] + head["bias"], 1e-4)


def test_masks_reach_policy_and_values():
    mask = jnp.asarray(np.random.default_rng(0).random((T, B, 4)) < 0.5).at[..., 2].set(True)
    timesteps = inputs(DISCRETE, mask=mask)
    _, _, (output, _) = run(ActorCritic(SMALL), DISCRETE, timesteps)
    probabilities = np.exp(np.asarray(output.distribution.log_probs()))
    np.testing.assert_array_equal(probabilities == 0, ~np.asarray(mask))
    _, _, (values, _) = run(QNetwork(SMALL), DISCRETE, timesteps)
    np.testing.assert_array_equal(values == np.finfo(np.float32).min, ~np.asarray(mask))
    assert np.all(np.isfinite(values))
    several = jnp.concatenate([mask[..., :3], jnp.ones((T, B, 2), bool)], axis=-1).at[..., 0].set(True)
    _, _, (output, _) = run(ActorCritic(SMALL), MULTI, inputs(MULTI, mask=several))
    logits = np.asarray(output.distribution.logits)
    np.testing.assert_array_equal(logits < -1e20, ~np.asarray(several))


# --- Q-network -----------------------------------------------------------------------------------------------------


def test_a_gaussian_may_have_its_mean_within_the_bounds():
    """BatchPPO's: the mean is squashed, the deviation is in the units of the action, and samples may lie beyond."""
    low, high = np.float32([-2, 1]), np.float32([2, 4])
    spec = EnvSpec("box", VECTOR, spaces.Box(low, high, (2,)))
    plain, bounded = (ActorCritic(SMALL, continuous=kind, initial_log_std=0.5) for kind in ("gaussian", "tanh_mean"))
    params = random_params(plain, spec)
    params["policy"]["head"]["output"]["kernel"] *= 9.0
    given = inputs(spec)
    free, within = (
        network.apply(params, given, (), spec=spec, model_state=(), train=False)[0].distribution
        for network in (plain, bounded)
    )
    assert type(within) is DiagonalGaussian
    location = np.asarray(free.mean, np.float64)
    assert (location < low).any() and (location > high).any(), "some means should need it"
    np.testing.assert_allclose(
        within.mean, (low + high) / 2 + (high - low) / 2 * np.tanh(location), rtol=1e-5, atol=1e-5
    )
    np.testing.assert_array_equal(within.log_std, free.log_std)
    noise = free.sample(keys := jax.random.split(jax.random.key(0), (T, B))) - free.mean
    np.testing.assert_allclose(within.sample(keys) - within.mean, noise, rtol=1e-5, atol=1e-5)
    best = np.asarray(within.mode())
    assert (best >= low).all() and (best <= high).all()
    action = np.asarray(within.sample(keys), np.float64)
    assert (action > high).any() or (action < low).any()
    std = np.exp(np.asarray(within.log_std, np.float64))
    density = -0.5 * ((action - np.asarray(within.mean)) / std) ** 2 - np.log(std) - 0.5 * np.log(2 * np.pi)
    np.testing.assert_allclose(within.log_prob(jnp.asarray(action, jnp.float32)), density.sum(-1), rtol=1e-4, atol=1e-4)


# --- errors and fields ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("network", "spec", "changes"),
    [
        (
            ActorCritic(SMALL),
            BOX,
            {
                "torso": None,
                "core": GRU(2),
                "shared": True,
                "previous_action": True,
                "previous_reward": True,
                "continuous": ["tanh", "tanh_mean"],
                "initial_log_std": -1.0,
                "state_dependent_std": True,
                "policy_gain": 0.1,
                "value_gain": 0.1,
                "head_widths": (3,),
            },
        ),
        (
            QNetwork(SMALL),
            DISCRETE,
            {
                "torso": None,
                "core": LSTM(2),
                "head": ActionValues(dueling=True),
                "previous_action": True,
                "previous_reward": True,
            },
        ),
        (
            QNetwork(SMALL, head=ActionValues(dueling=True)),
            DISCRETE,
            {"head": [ActionValues(True, (3,)), ActionValues(True, (), 0.5), ActionValues(False)]},
        ),
        (ActorCritic(SMALL, GRU(2)), DISCRETE, {"core": GRU(3)}),
        (ActorCritic(SMALL, GRU(2)), DISCRETE, {"core_of": ["policy", "value"]}),
        (
            ActorCritic(),
            EnvSpec("states", STATES, spaces.Discrete(2)),
            {"policy_observation_keys": ("state",), "value_observation_keys": ("state",)},
        ),
        (QNetwork(), EnvSpec("states", STATES, spaces.Discrete(2)), {"observation_keys": ("state",)}),
        (ActorCritic(SMALL, LSTM(2)), DISCRETE, {"core": LSTM(3)}),
    ],
)
def test_every_field_changes_the_program(network, spec, changes):
    def program(network):
        def both(key):
            params, _ = network.init(key, spec)
            output, _ = evaluate(network, params, read(spec), batched(network.initial_carry(spec)), spec)
            return output if isinstance(network, QNetwork) else output.distribution.mode(), params

        return str(jax.make_jaxpr(both)(jax.random.key(0)))

    def read(spec):
        return states().replace(first=jnp.zeros((T, B), bool)) if spec.observation_space is STATES else inputs(spec)

    if len(changes) > 1:
        others = ("observation_keys", "core_of")  # each in a row of its own
        changed = {field.name for field in dataclasses.fields(network) if not field.name.endswith(others)}
        assert set(changes) == changed or spec.observation_space is STATES
    before = program(network)
    for field, values in changes.items():
        for value in values if isinstance(values, list) else [values]:
            assert program(dataclasses.replace(network, **{field: value})) != before, field
