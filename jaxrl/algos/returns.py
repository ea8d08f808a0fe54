"""Returns and advantages: one function an equation; batched, time-major `[T, B]`, aware of truncation.

By the row convention (`jaxrl.types`) the last observation of an episode is a row of its own, so the value of the
observation after row t is always the value of row t + 1, and `bootstrap_value` after the last row. Hence
  - bootstrapping stops only at `terminated`: where an episode is truncated, or the rollout ends, the value of the
    true next observation stands for the rest;
  - what is summed over time is cut at `terminated | truncated`, so nothing leaks from one episode into another;
  - the return of a row of weight 0 is its own value and its advantage is 0. A row before one therefore bootstraps
    from it, whatever the reason for the weight.
Values of rows that no return depends on may be anything, NaN and infinities included.

Nothing here stops gradients: that is for the loss to decide.
"""

import chex
import jax
import jax.numpy as jnp
from flax import struct

Scalar = float | jax.Array


@struct.dataclass
class VTrace:
    """What `vtrace` gives, both `[T, B]`."""

    values: jax.Array  # v_s, what the value function is fitted to
    advantages: jax.Array  # of the policy gradient, with its clipped importance weight


def gae(
    rewards: jax.Array,
    values: jax.Array,
    bootstrap_value: jax.Array,
    terminated: jax.Array,
    truncated: jax.Array,
    weight: jax.Array,
    gamma: Scalar,
    gae_lambda: Scalar,
) -> jax.Array:
    """Generalised advantage estimation (Schulman et al., 2016, arXiv:1506.02438, equation 16).

    A_t = delta_t + gamma lambda A_{t+1},  delta_t = r_t + gamma V(o_{t+1}) - V(o_t).

    Args:
      rewards: what followed the action of each row, shape (T, B).
      values: V(o_t), shape (T, B).
      bootstrap_value: V of the observation after the last row, shape (B,).
      terminated, truncated: the ending that followed the action, bool, shape (T, B).
      weight: False at last observations and masked rows, bool, shape (T, B).
      gamma: discount, a scalar in [0, 1], may be traced.
      gae_lambda: lambda, a scalar in [0, 1]: 0 is the one-step error, 1 the Monte-Carlo return less the value.

    Returns:
      Advantages, shape (T, B); 0 where weight is False. `advantages + values` are the lambda-returns.
    """
    _check(rewards, values, bootstrap_value, terminated, truncated, weight)
    continues = weight & ~(terminated | truncated)
    errors = _td_errors(rewards, values, values, bootstrap_value, terminated, weight, gamma)
    return _backward_sum(errors, jnp.where(continues, gamma * gae_lambda, 0.0))


def lambda_returns(
    rewards: jax.Array,
    values: jax.Array,
    bootstrap_value: jax.Array,
    terminated: jax.Array,
    truncated: jax.Array,
    weight: jax.Array,
    gamma: Scalar,
    return_lambda: Scalar,
) -> jax.Array:
    """Lambda-returns (Sutton and Barto, 2018, equation 12.20 in state-value form).

    G_t = r_t + gamma ((1 - lambda) V(o_{t+1}) + lambda G_{t+1}).

    Args:
      rewards, values, bootstrap_value, terminated, truncated, weight, gamma: as in `gae`.
      return_lambda: lambda, a scalar in [0, 1].

    Returns:
      Returns, shape (T, B); the row's own value where weight is False.
    """
    _check(rewards, values, bootstrap_value, terminated, truncated, weight)
    following = jnp.where(terminated, 0.0, _following(values, bootstrap_value))
    next_weight = _following(weight, jnp.zeros_like(weight[0]))
    continues = weight & ~(terminated | truncated) & next_weight
    bootstrapped = jnp.where(continues, gamma * (1.0 - return_lambda), gamma) * following
    one_step = jnp.where(weight, rewards + bootstrapped, 0.0)
    return jnp.where(weight, _backward_sum(one_step, jnp.where(continues, gamma * return_lambda, 0.0)), values)


def discounted_returns(
    rewards: jax.Array,
    values: jax.Array,
    bootstrap_value: jax.Array,
    terminated: jax.Array,
    truncated: jax.Array,
    weight: jax.Array,
    gamma: Scalar,
) -> jax.Array:
    """Monte-Carlo returns, bootstrapped at truncation and at the rollout's end (Sutton and Barto, 2018, equation 3.9).

    G_t = r_t + gamma G_{t+1}.

    Args:
      rewards, values, bootstrap_value, terminated, truncated, weight, gamma: as in `gae`.

    Returns:
      Returns, shape (T, B); the row's own value where weight is False.
    """
    return lambda_returns(rewards, values, bootstrap_value, terminated, truncated, weight, gamma, 1.0)


def n_step_returns(
    rewards: jax.Array,
    values: jax.Array,
    bootstrap_value: jax.Array,
    terminated: jax.Array,
    truncated: jax.Array,
    weight: jax.Array,
    gamma: Scalar,
    n: int,
) -> jax.Array:
    """n-step returns (Sutton and Barto, 2018, equation 7.1).

    G_t = r_t + gamma r_{t+1} + ... + gamma^{n-1} r_{t+n-1} + gamma^n V(o_{t+n}), with fewer steps where the episode
    or the rollout ends before.

    Args:
      rewards, values, bootstrap_value, terminated, truncated, weight, gamma: as in `gae`.
      n: steps, at least 1, static; from T on the result is `discounted_returns`.

    Returns:
      Returns, shape (T, B); the row's own value where weight is False.

    Raises:
      ValueError: n is below 1.
    """
    _check(rewards, values, bootstrap_value, terminated, truncated, weight)
    if n < 1:
        raise ValueError(f"n={n} steps; an n-step return needs at least 1")
    following = _following(values, bootstrap_value)

    def one_step_more(_, returns):
        after = jnp.where(truncated, following, _following(returns, bootstrap_value))
        return jnp.where(weight, rewards + gamma * jnp.where(terminated, 0.0, after), values)

    return jax.lax.fori_loop(0, min(n, rewards.shape[0]), one_step_more, values)


def vtrace(
    rewards: jax.Array,
    values: jax.Array,
    bootstrap_value: jax.Array,
    rhos: jax.Array,
    terminated: jax.Array,
    truncated: jax.Array,
    weight: jax.Array,
    gamma: Scalar,
    *,
    trace_lambda: Scalar = 1.0,
    clip_rho: Scalar = 1.0,
    clip_c: Scalar = 1.0,
    clip_pg_rho: Scalar = 1.0,
) -> VTrace:
    """V-trace targets and policy-gradient advantages (Espeholt et al., 2018, arXiv:1802.01561, equation 1).

    v_s = V(o_s) + sum_{t >= s} gamma^{t-s} (prod_{s <= i < t} c_i) rho_t (r_t + gamma V(o_{t+1}) - V(o_t)),
    with rho_t = min(clip_rho, pi/mu) and c_i = lambda min(clip_c, pi/mu); the policy gradient's advantage is
    min(clip_pg_rho, pi/mu) (r_s + gamma v_{s+1} - V(o_s)) (section 4.2).

    Args:
      rewards, values, bootstrap_value, terminated, truncated, weight, gamma: as in `gae`.
      rhos: pi(a_t|o_t) / mu(a_t|o_t), of the learner's and the actor's policy, not clipped, shape (T, B).
      trace_lambda: lambda, a scalar in [0, 1] (remark 2 of the paper).
      clip_rho, clip_c, clip_pg_rho: rho-bar, c-bar and rho-bar of the policy gradient, scalars; infinity for none.

    Returns:
      `VTrace`; where weight is False the value is the row's own and the advantage 0.
    """
    _check(rewards, values, bootstrap_value, terminated, truncated, weight, rhos)
    continues = weight & ~(terminated | truncated)
    rhos = jnp.where(weight, rhos, 0.0)
    errors = _td_errors(rewards, values, values, bootstrap_value, terminated, weight, gamma)
    traces = jnp.where(continues, gamma * trace_lambda * jnp.minimum(clip_c, rhos), 0.0)
    corrections = _backward_sum(jnp.minimum(clip_rho, rhos) * errors, traces)
    # r_s + gamma v_{s+1} - V(o_s) is the temporal-difference error plus the discounted correction of the next row.
    after = jnp.where(continues, gamma * _following(corrections, jnp.zeros_like(bootstrap_value)), 0.0)
    return VTrace(values + corrections, jnp.minimum(clip_pg_rho, rhos) * (errors + after))


def retrace(
    rewards: jax.Array,
    q_values: jax.Array,
    values: jax.Array,
    bootstrap_value: jax.Array,
    rhos: jax.Array,
    terminated: jax.Array,
    truncated: jax.Array,
    weight: jax.Array,
    gamma: Scalar,
    trace_lambda: Scalar,
) -> jax.Array:
    """Retrace(lambda) targets of the action values (Munos et al., 2016, arXiv:1606.02647, equations 3 and 4).

    G_t = r_t + gamma (V(o_{t+1}) + c_{t+1} (G_{t+1} - Q(o_{t+1}, a_{t+1}))), with V(o) the expectation of Q(o, .)
    under the target policy and c = lambda min(1, pi/mu).

    Args:
      rewards, terminated, truncated, weight, gamma: as in `gae`.
      q_values: Q(o_t, a_t) of the actions taken, shape (T, B).
      values: the expectation of Q(o_t, .) under the target policy, shape (T, B).
      bootstrap_value: that expectation at the observation after the last row, shape (B,).
      rhos: pi(a_t|o_t) / mu(a_t|o_t), not clipped, shape (T, B).
      trace_lambda: lambda, a scalar in [0, 1].

    Returns:
      Targets for Q(o_t, a_t), shape (T, B); where weight is False the row's own `q_values`.
    """
    _check(rewards, values, bootstrap_value, terminated, truncated, weight, rhos, q_values)
    continues = weight & ~(terminated | truncated)
    errors = _td_errors(rewards, q_values, values, bootstrap_value, terminated, weight, gamma)
    traces = trace_lambda * jnp.minimum(1.0, jnp.where(weight, rhos, 0.0))
    next_traces = jnp.where(continues, gamma * _following(traces, jnp.zeros_like(bootstrap_value)), 0.0)
    return q_values + _backward_sum(errors, next_traces)


def q_lambda(
    rewards: jax.Array,
    q_values: jax.Array,
    bootstrap_q_values: jax.Array,
    terminated: jax.Array,
    truncated: jax.Array,
    weight: jax.Array,
    gamma: Scalar,
    return_lambda: Scalar,
) -> jax.Array:
    """Peng's Q(lambda) as in PQN (Gallici et al., 2024, arXiv:2407.04811, section 4; Peng and Williams, 1996).

    G_t = r_t + gamma ((1 - lambda) max_a Q(o_{t+1}, a) + lambda G_{t+1}).

    Args:
      rewards, terminated, truncated, weight, gamma: as in `gae`.
      q_values: Q(o_t, .), -inf at actions that are not allowed, shape (T, B, actions).
      bootstrap_q_values: the same of the observation after the last row, shape (B, actions).
      return_lambda: lambda, a scalar in [0, 1].

    Returns:
      Targets for Q(o_t, a_t), shape (T, B); meaningless where weight is False.
    """
    chex.assert_rank([q_values, bootstrap_q_values], [3, 2])
    values, bootstrap_value = jnp.max(q_values, axis=-1), jnp.max(bootstrap_q_values, axis=-1)
    return lambda_returns(rewards, values, bootstrap_value, terminated, truncated, weight, gamma, return_lambda)


def _check(rewards, values, bootstrap_value, terminated, truncated, weight, *others):
    """Ranks, shapes and types, before anything else."""
    chex.assert_rank([rewards, bootstrap_value], [2, 1])
    chex.assert_equal_shape([rewards, values, terminated, truncated, weight, *others])
    chex.assert_shape(bootstrap_value, rewards.shape[1:])
    chex.assert_type([rewards, values, bootstrap_value, *others], float)
    chex.assert_type([terminated, truncated, weight], bool)


def _following(x, after):
    """x of row t + 1 at row t; `after` [B] at the last one."""
    return jnp.concatenate([x[1:], after[None]])


def _td_errors(rewards, predictions, values, bootstrap_value, terminated, weight, gamma):
    """r_t + gamma V(o_{t+1}) - prediction_t; 0 where weight is False."""
    # `where` and not a product: the value after a terminal observation may be infinite or NaN.
    following = jnp.where(terminated, 0.0, _following(values, bootstrap_value))
    return jnp.where(weight, rewards + gamma * following - predictions, 0.0)


def _backward_sum(x, coefficients):
    """y_t = x_t + coefficients_t y_{t+1}, with y_T = 0.

    A plain scan: on CPU it takes 7, 18 and 196 us for 4, 64 and 2048 environments of 128 rows, where unrolling it 16
    times takes 60, 92 and 1787 us and `jax.lax.associative_scan` 37, 130 and 975 us.
    """

    def step(y, row):
        y = row[0] + row[1] * y
        return y, y

    return jax.lax.scan(step, jnp.zeros_like(x[0]), (x, coefficients), reverse=True)[1]
