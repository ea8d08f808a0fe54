"""The command `jaxrl pbt`, after its flags are read: a population, its table, and the winner's schedules."""

from jaxrl.cli.runs import ParsedCommand
from jaxrl.cli.sweep import PICTURES
from jaxrl.cli.training import prepare
from jaxrl.cli.tune import searched_space, train_command
from jaxrl.parallel.multihost import distributed
from jaxrl.sweeps.pbt import pbt as run_pbt


def pbt(parsed: ParsedCommand) -> int:
    """Train the population described by the flags; return the exit code.

    Args:
      parsed: the parsed flags.
    """
    request = prepare("pbt", parsed)
    arguments = {name: value for name, value in request.arguments.items() if name not in ("out", "space")}
    arguments |= {"env": request.env, "num_envs": request.num_envs}
    out, space = request.arguments["out"], searched_space(request)
    result = run_pbt(request.algo, **arguments, **space)
    if not distributed.is_leader():
        return 0
    print(result.table())
    episodes = f"{result.fresh_returns.size} fresh episodes"
    print(f"winner: member {result.lineage.winner}, return {result.fresh_score:.6g} in {episodes}")
    print(f"{result.wall_seconds:,.0f} s; {result.steps_per_second:,.0f} steps/s over all members while training")
    print(f"its schedules: {' '.join(train_command('pbt', space | result.schedules, parsed.argv))}")
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        if out.suffix in PICTURES:
            result.plot(out)
        else:
            out.write_text(result.table() + "\n", encoding="utf-8")
        print(f"written to {out}")
    if (run_dir := arguments["run_dir"]) is not None:
        print(f"lineage, curves, table and the winner's policy: {run_dir}")
    elif out is None:
        print("nothing is kept: --run-dir DIR keeps the lineage, the curves, the table and the winner's policy")
    return 0
