"""The recipes of docs/recipes: what their tools make of them, and their commands as two processes on loopback."""

import argparse
import contextlib
import json
import os
import re
import shlex
import signal
import socket
import sys
import tempfile
from pathlib import Path

import pytest
import yaml
from helpers.patience import PATIENCE, wait_for
from helpers.processes import environment, running

from jaxrl.run.directory.checkpoint import complete_steps

ROOT = Path(__file__).parents[1]
RECIPES = ROOT / "docs" / "recipes"
PAGE = (ROOT / "docs" / "distributed.md").read_text()
GRACE = 120  # seconds from SIGTERM to SIGKILL, at least: a chunk of the run and a checkpoint
# What every command is given besides: the least that trains.
TINY = ["--rollout-length", "8", "--network.torso", "mlp:8", "--num-envs", "4"]
TINY += ["--evaluation-episodes", "2", "--evaluate-every", "0", "--no-progress"]


def documents(name):
    return list(yaml.safe_load_all((RECIPES / name).read_text()))


def job_spec():
    """Return the JobSet, its only job, and the specification of that."""
    (jobset,) = documents("jobset.yaml")
    (job,) = jobset["spec"]["replicatedJobs"]
    return jobset, job, job["template"]["spec"]


def pod_of_train_job():
    (train_job,) = documents("kubeflow.yaml")
    (patch,) = train_job["spec"]["runtimePatches"]
    (job,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    return train_job, job["template"]["spec"]["template"]["spec"]


def flag(words, name):
    return words[words.index(name) + 1]


# --- their contents ---------------------------------------------------------------------------------------------


def test_every_recipe_is_on_the_page():
    assert sorted(re.findall(r"\]\(recipes/([\w.]+)\)", PAGE)) == sorted(path.name for path in RECIPES.iterdir())


def test_pods_keep_the_run_and_have_time_to_save():
    _, _, spec = job_spec()
    train_job, patched = pod_of_train_job()
    for pod, words in (
        (spec["template"]["spec"], spec["template"]["spec"]["containers"][0]["command"]),
        (patched, train_job["spec"]["trainer"]["command"]),
    ):
        (container,) = pod["containers"]
        (mount,) = container["volumeMounts"]
        assert flag(words, "--run-dir").startswith(mount["mountPath"] + "/")
        assert mount["name"] in [volume["name"] for volume in pod["volumes"] if "persistentVolumeClaim" in volume]
        assert pod["terminationGracePeriodSeconds"] >= GRACE
        assert "--overwrite" not in words, "it would begin anew where it should resume"


def test_the_pods_of_a_jobset_find_the_first_of_them():
    jobset, job, spec = job_spec()
    name, words = jobset["metadata"]["name"], spec["template"]["spec"]["containers"][0]["command"]
    assert flag(words, "--coordinator").partition(":")[0] == f"{name}-{job['name']}-0-0.{name}"
    assert int(flag(words, "--num-processes")) == spec["parallelism"] == spec["completions"]
    assert spec["completionMode"] == "Indexed" and flag(words, "--process-id") == "$(JOB_COMPLETION_INDEX)"
    # A pod that fails ends the job, which ends the set: else one would wait for others that train without it.
    assert spec["backoffLimit"] == 0 and jobset["spec"]["failurePolicy"]["maxRestarts"] > 0


def test_machines_of_skypilot_share_the_run_directory():
    (task,) = documents("skypilot.yaml")
    _, learner, _ = documents("skypilot_group.yaml")
    for each in (task, learner):
        (run_dir,) = re.findall(r"--run-dir (\S+)", each["run"])
        assert any(run_dir.startswith(mount + "/") for mount in each["volumes"])
    again = task["resources"]["job_recovery"]  # SkyPilot would not say that it does not know a name there
    assert again == {"max_restarts_on_errors": 10, "recover_on_exit_codes": [128 + signal.SIGTERM]}


def test_slurm_asks_for_time_to_save():
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", (RECIPES / "slurm.sh").read_text(), re.MULTILINE))
    name, seconds = asked["signal"].split("@")
    assert name == "TERM" and int(seconds) >= GRACE and "requeue" in asked


# --- by their tools --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "model"), [("jobset.yaml", "JobsetV1alpha2JobSet"), ("kubeflow.yaml", "TrainerV1alpha1TrainJob")]
)
def test_kubeflow_knows_every_field(recipe, model):
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="needs the package kubeflow-trainer-api")
    (document,) = documents(recipe)
    assert getattr(models, model).from_dict(document).to_dict() == document, "it leaves out what it does not know"


@pytest.mark.parametrize("recipe", ["skypilot.yaml", "skypilot_group.yaml"])
def test_skypilot_reads_it(recipe):
    pytest.importorskip("sky", reason="needs the package skypilot")
    from sky.utils import dag_utils

    if recipe == "skypilot.yaml":
        (task,) = dag_utils.load_chain_dag_from_yaml(str(RECIPES / recipe)).tasks
        assert task.num_nodes == 2 and "--distributed" in task.run
        return
    token = [("RAY_AUTH_TOKEN", "of all")]
    group = dag_utils.load_job_group_from_yaml(str(RECIPES / recipe), secrets_overrides=token)
    assert group.is_job_group() and [task.name for task in group.tasks] == ["learner", "actors"]
    assert group.primary_tasks == ["learner"]


def xpk_words(cluster):
    """Return the arguments that the recipe passes to xpk."""
    line = (RECIPES / "xpk.sh").read_text().replace("\\\n", " ").splitlines()[-1]
    program, *words = shlex.split(line.replace('"$1"', cluster))
    assert program == "xpk"
    return words


def test_xpk_reads_it():
    core = pytest.importorskip("xpk.parser.core", reason="needs the package xpk")
    parser = argparse.ArgumentParser()
    core.set_parser(parser)
    given = parser.parse_args(xpk_words("mine"))
    assert (given.cluster, given.tpu_type, given.storage) == ("mine", "v5litepod-16", ["runs"])
    assert int(given.termination_grace_period_seconds) >= GRACE and int(given.max_restarts) > 0
    assert given.command.startswith("exec jaxrl train ")


# --- on loopback -----------------------------------------------------------------------------------------------------


def expanded(words, env):
    """Fill in variables as Kubernetes does for a container."""
    return [re.sub(r"\$\((\w+)\)", lambda found: env[found[1]], word) for word in words]


def jobset(index, port):
    _, _, spec = job_spec()
    env = {"JOB_COMPLETION_INDEX": str(index)}
    words = expanded(spec["template"]["spec"]["containers"][0]["command"], env)
    return [f"127.0.0.1:{port}" if word.startswith("cartpole-workers-0-0.") else word for word in words], env


def kubeflow(index, port):
    env = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_COORDINATOR_PORT": str(port)}
    env |= {"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": str(index), "JAX_DISTRIBUTED_BACKEND": "gloo"}
    return expanded(pod_of_train_job()[0]["spec"]["trainer"]["command"], env), env


def skypilot(index, port):
    (task,) = documents("skypilot.yaml")
    env = {"SKYPILOT_NODE_RANK": str(index), "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1"}
    return ["bash", "-c", task["run"].replace(":8476", f":{port}")], env


def slurm(index, port):
    env = {"SLURM_JOB_ID": str(port - 61440 + 4096), "SLURM_NTASKS": "2", "SLURM_PROCID": str(index)}  # JAX: % 4096
    env |= {"SLURM_LOCALID": "0", "SLURM_STEP_NODELIST": "127.0.0.1", "SLURM_STEP_NUM_NODES": "2"}
    return ["bash", str(RECIPES / "slurm.sh")], env


def xpk(index, port):
    env = {"TPU_WORKER_ID": str(index), "TPU_WORKER_HOSTNAMES": "127.0.0.1,127.0.0.1", "JAX_FORCE_TPU_INIT": "1"}
    env |= {"TPU_SKIP_MDS_QUERY": "1", "JAX_COORDINATOR_PORT": str(port), "MEGASCALE_COORDINATOR_ADDRESS": "127.0.0.1"}
    env |= {"MEGASCALE_NUM_SLICES": "1", "MEGASCALE_SLICE_ID": "0"}  # else JAX asks a server of Google's cloud
    return ["bash", "-c", flag(xpk_words("mine"), "--command")], env


TOOLS = [jobset, kubeflow, skypilot, xpk]


def free_port(low=61440, high=65535):
    for port in range(low + os.getpid() % 1000, high):
        with socket.socket() as tried, contextlib.suppress(OSError):
            tried.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")


def programs(folder, *more):
    """Write programs with the names that recipes call: jaxrl with further words, and Slurm's; return their folder."""
    bin = folder / ".venv" / "bin"
    bin.mkdir(parents=True, exist_ok=True)
    again = shlex.join([*TINY, "--run-dir", str(folder / "run"), *more])
    texts = {
        "jaxrl": f'exec {shlex.quote(sys.executable)} -m jaxrl "$@" {again}',
        "srun": 'while [ "${1#--}" != "$1" ]; do shift; done; exec "$@"',
        "scontrol": f'echo "$@" >> {shlex.quote(str(folder / "scontrol"))}',
    }
    for name, text in texts.items():
        (bin / name).write_text(f"#!/bin/sh\n{text}\n")
        (bin / name).chmod(0o755)
    return bin


@contextlib.contextmanager
def started(tool, folder, *more):
    """Start the command of a recipe as two processes; `tool` returns the words and variables of each."""
    port, bin = free_port(), programs(folder, *more)
    with contextlib.ExitStack() as stack:
        processes = []
        for index in range(2):
            words, env = tool(index, port)
            path = [str(bin), str(Path(sys.executable).parent), os.environ["PATH"]]
            env = environment(**env, PATH=os.pathsep.join(path))
            processes.append(stack.enter_context(running(words, folder / f"{index}.log", env=env, cwd=folder)))
        yield processes


def codes(processes, folder):
    found = [process.wait(PATIENCE) for process in processes]
    return found, "\n".join((folder / f"{index}.log").read_text() for index in range(2))


@pytest.mark.long
@pytest.mark.parametrize("tool", TOOLS)  # slurm has its own below, of a run that is told to end
def test_its_command_is_one_run_of_two_processes(tool, tmp_path):
    with started(tool, tmp_path, "--total-steps", "128") as processes:
        found, said = codes(processes, tmp_path)
    assert found == [0, 0], said
    assert json.loads((tmp_path / "run" / "result.json").read_text())["total_steps"] == 128
    assert said.count("PPO on gymnax:CartPole-v1: 128 steps") == 1, "one of them alone tells the result"


def group(index, port):
    _, *tasks = documents("skypilot_group.yaml")
    text = tasks[index]["run"].replace("6379", str(port)).replace("learner-0.${SKYPILOT_JOBGROUP_NAME}", "127.0.0.1")
    return ["bash", "-c", text], {"RAY_AUTH_TOKEN": "0123456789abcdef" * 4, "RAY_worker_niceness": "0"} | tasks[index][
        "envs"
    ]


@pytest.fixture
def ray_folder():
    """Return a folder with a short name, for Ray's sockets; in the usual one others would find and join the cluster."""
    with tempfile.TemporaryDirectory(prefix="ray") as folder:
        yield folder


@pytest.mark.long
def test_the_learner_of_a_group_has_its_actors_on_the_other_machine(tmp_path, ray_folder, monkeypatch):
    pytest.importorskip("ray")
    few = ["--total-steps", "64", "--remote", "remote:actors=2:policy=true:backend=ray", "--evaluation-episodes", "1"]
    few += ["--env-params", "max_episode_steps=40"]
    monkeypatch.setenv("RAY_TMPDIR", str(ray_folder))
    with started(group, tmp_path, *few) as (learner, actors):
        code = learner.wait(PATIENCE)
        said = "\n".join((tmp_path / f"{index}.log").read_text() for index in range(2))
        assert code == 0, said
    assert json.loads((tmp_path / "run" / "result.json").read_text())["total_steps"] == 64


def test_ray_train_has_one_run_of_two_workers(tmp_path):
    pytest.importorskip("ray.train")
    from helpers import clusters

    text = (RECIPES / "ray_train.py").read_text().replace("8476", str(free_port()))
    recipe = {"__name__": "recipe"}
    exec(compile(text, "ray_train.py", "exec"), recipe)
    more = {"evaluation_episodes": 2, "evaluate_every": 0, "progress": False}
    with clusters.cluster():
        trainer = recipe["trainer"](2, False, total_steps=512, num_envs=4, run_dir=str(tmp_path / "run"), **more)
        trainer.fit()
    assert json.loads((tmp_path / "run" / "result.json").read_text())["total_steps"] == 512


@pytest.mark.faults
def test_sigterm_at_one_saves_on_all_and_the_same_command_resumes(tmp_path):
    """Under Slurm, whose recipe also asks to be queued again."""
    run_dir = tmp_path / "run"
    with started(slurm, tmp_path, "--total-steps", "1000000000", "--checkpoint-every", "64") as processes:

        def has_ended():
            return any(process.poll() is not None for process in processes)

        wait_for(lambda: has_ended() or complete_steps(run_dir / "checkpoints"))
        assert not has_ended()
        os.killpg(processes[1].pid, signal.SIGTERM)
        found, said = codes(processes, tmp_path)
    assert found[0] == 128 + signal.SIGTERM, said
    assert (tmp_path / "scontrol").read_text().startswith("requeue ")
    step = complete_steps(run_dir / "checkpoints")[-1]
    with started(slurm, tmp_path, "--total-steps", str(step + 64)) as processes:
        found, said = codes(processes, tmp_path)
    assert found == [0, 0], said
    assert said.count(f"PPO on gymnax:CartPole-v1: {step + 64} steps") == 1, "one of them alone tells the result"
    record = json.loads((run_dir / "result.json").read_text())
    assert record["total_steps"] == step + 64 and record["session_steps"] == 64
