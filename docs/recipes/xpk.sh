#!/bin/bash
# A slice of 16 TPU chips (four machines of four) on GKE by xpk: bash xpk.sh CLUSTER, after `xpk cluster create`.
# Needs an image with jaxrl and jax[tpu], and a storage "runs" of that cluster, which `xpk storage attach` mounts at /runs.
# A pod that is evicted saves within the grace period and ends with 143, for which xpk starts all again: they resume.
# `exec`, because xpk passes SIGTERM on to the shell that it started, which need not pass it on.
xpk workload create \
    --cluster "$1" \
    --workload cartpole \
    --tpu-type v5litepod-16 \
    --num-slices 1 \
    --docker-image jaxrl:0.1.0 \
    --storage runs \
    --env JAXRL_CACHE=/runs/cache \
    --max-restarts 10 \
    --termination-grace-period-seconds 120 \
    --command "exec jaxrl train ppo --env gymnax:CartPole-v1 --total-steps 50000000 --num-envs 2048 --run-dir /runs/cartpole --distributed"
