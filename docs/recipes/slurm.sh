#!/bin/bash
# Two nodes of eight GPUs under Slurm, one process for each GPU: sbatch slurm.sh
# Needs .venv and runs/ in this directory, on a file system that all nodes share.
#SBATCH --job-name=cartpole
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --time=04:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=TERM@180

# SIGTERM comes 180 s before the time is over, more than a chunk of the run and a checkpoint take. All tasks save and end
# with 143; the job goes back into the queue, and the same command resumes.
srun --kill-on-bad-exit=0 .venv/bin/jaxrl train ppo --env gymnax:CartPole-v1 --total-steps 50000000 --num-envs 2048 \
    --run-dir runs/cartpole --distributed
code=$?
if [ $code -eq 143 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit $code
