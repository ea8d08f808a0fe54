"""A small population."""

import jaxrl
from helpers import programs
from helpers.programs import ROWS

POINTS, MEMBERS, COPIES = 6, 6, 2
SPACE = {"learning_rate": jaxrl.LogUniform(1e-4, 1e-1), "clip": jaxrl.Uniform(0.1, 0.4), "gamma": [0.9, 0.95, 0.99]}
FIXED = {"gae_lambda": 0.95, "value_cost": 0.5, "max_grad_norm": 0.5}  # of the table of `jaxrl.tune`


def population(run_dir=None, algo=programs.PPO, points=POINTS, members=MEMBERS, **settings):
    """Six members, two of which copy others at each of five points, with three hyperparameters."""
    settings = {"fraction": COPIES / MEMBERS, "exploit_from": 0.0, "evaluation_episodes": 8, "devices": 1} | settings
    if algo is programs.PPO:
        settings = SPACE | FIXED | settings
    return jaxrl.pbt(
        algo,
        programs.ENV,
        population=members,
        total_steps=2 * points * ROWS,
        exploit_every=2 * ROWS,
        topology=programs.anakin(),
        mapping="in_turn",
        run_dir=run_dir,
        progress=False,
        **settings,
    )
