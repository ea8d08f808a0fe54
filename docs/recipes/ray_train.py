"""Four workers of Ray Train, one GPU each, as one run: `ray job submit --working-dir . -- python ray_train.py`.

A worker that is lost costs what came after the last checkpoint: Ray starts all again, and the run resumes. Every
machine needs jaxrl[ray], and the run directory on a file system that all share. On TPUs `ray.train.v2.jax.JaxTrainer`
reserves a slice and joins its processes itself: leave `initialize` out there.
"""

from ray import train
from ray.train.collective import broadcast_from_rank_zero
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from ray.util import get_node_ip_address


def train_loop(settings):
    import jaxrl
    from jaxrl.parallel.multihost import distributed

    here = train.get_context()
    coordinator = broadcast_from_rank_zero(f"{get_node_ip_address()}:8476")
    distributed.initialize(coordinator, here.get_world_size(), here.get_world_rank())
    jaxrl.train("ppo", "gymnax:CartPole-v1", **settings)


def trainer(workers, use_gpu, **settings):
    scaling = train.ScalingConfig(num_workers=workers, use_gpu=use_gpu)
    again = train.RunConfig(failure_config=train.FailureConfig(max_failures=10))
    return DataParallelTrainer(train_loop, train_loop_config=settings, scaling_config=scaling, run_config=again)


if __name__ == "__main__":
    trainer(4, True, total_steps=50_000_000, num_envs=2048, run_dir="/runs/cartpole").fit()
