"""deploy/: its commands are those of rlx, and its scripts are valid."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from rlx.cli import options, sweep
from rlx.cluster.placement import Node
from rlx.cluster.resources import plan_resources
from rlx.config.loading import from_tree, with_overrides

ROOT = Path(__file__).resolve().parent.parent


def test_the_command_of_the_kubernetes_job_is_one_that_rlx_takes() -> None:
    job = yaml.safe_load((ROOT / "deploy" / "rayjob.yaml").read_text())
    program, command, *words = shlex.split(job["spec"]["entrypoint"])
    assert (program, command, job["kind"]) == ("rlx", "sweep", "RayJob")
    args, given = options.parse(sweep.argument_parser(), words)
    config = from_tree(with_overrides({}, given))
    assert (args.trials, config.scaling.num_workers, config.wait_for_resources) == (32, 4, 1800)
    groups = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    gpus = int(groups[0]["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"])
    node = Node({"CPU": 96.0, "GPU": float(gpus), "memory": 1e12})
    assert plan_resources(config).fits([node]) == 1  # a trial is one node


def test_every_container_of_the_kubernetes_job_has_shared_memory() -> None:
    cluster = yaml.safe_load((ROOT / "deploy" / "rayjob.yaml").read_text())["spec"]["rayClusterSpec"]
    for group in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]:
        pod = group["template"]["spec"]
        assert pod["containers"][0]["volumeMounts"] == [{"name": "shm", "mountPath": "/dev/shm"}]
        assert pod["volumes"][0]["emptyDir"]["medium"] == "Memory"


STAND_INS = {
    "scontrol": "printf 'n1\\nn2\\n'",
    "srun": 'while [[ $1 == --* ]]; do shift; done; [[ $1 == hostname ]] && echo "fd00::2 10.0.0.2" || exec "$@"',
    "ray": """
        [[ "$RAY_AUTH_MODE $SRUN_CPUS_PER_TASK" == "token 4" ]] && echo "$*" >>calls
        if [[ $1 == status ]]; then [[ -e up ]]; exit; fi
        [[ $* != *--head* ]] || { sleep 1; $HEAD; }
        sleep 1
    """,
    "rlx": 'sleep 1; echo "$RAY_ADDRESS $*" >>calls',
}


def run_slurm_script(folder: Path, head: str) -> tuple[int, list[str]]:
    """Runs it with stand-ins for the commands that it calls; returns its exit code, and the calls of ray and rlx.

    Args:
        head: what the head node does when Ray has started there.
    """
    for name, body in STAND_INS.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(0o755)
    job = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_NUM_NODES": "2", "SLURM_CPUS_PER_TASK": "4"}
    environment = {"PATH": f"{folder}:{os.environ['PATH']}", "HEAD": head, "SLURM_GPUS_ON_NODE": "8", **job}
    script = ["bash", str(ROOT / "deploy" / "slurm.sh"), "--name", "lr"]
    code = subprocess.run(script, cwd=folder, env=environment, timeout=60).returncode
    return code, (folder / "calls").read_text().splitlines()


@pytest.mark.slow
def test_the_slurm_script_starts_a_node_on_each_machine_and_then_the_sweep(tmp_path: Path) -> None:
    code, calls = run_slurm_script(tmp_path, "touch up")
    options = "start --block --num-cpus=4 --num-gpus=8"
    started = [call for call in calls if call.startswith("start")]
    assert started[0] == f"{options} --head --node-ip-address=10.0.0.2 --port=6379"
    assert started[1:] == [f"{options} --address=10.0.0.2:6379"]
    assert (code, calls[-1]) == (0, "10.0.0.2:6379 sweep --wait-for-resources 600 --name lr")


@pytest.mark.slow
def test_the_slurm_script_ends_when_its_head_does_not_start(tmp_path: Path) -> None:
    code, calls = run_slurm_script(tmp_path, "exit 1")
    assert code == 1 and not any("sweep" in call for call in calls)


def test_the_slurm_script_can_resume_a_sweep() -> None:
    script = (ROOT / "deploy" / "slurm.sh").read_text()
    words = shlex.split(script.partition("exec rlx sweep ")[2].partition('"$@"')[0])
    parser = sweep.argument_parser()
    args, given = options.parse(parser, [*words, "--resume", "lr", "--storage", "/nfs/rlx"])
    sweep.refuse_options(args, given)
