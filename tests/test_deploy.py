"""deploy/: its commands are those of rlx, and its scripts are valid."""

import shlex
import subprocess
from pathlib import Path

import yaml

from rlx.cli import options, sweep
from rlx.cluster.resources import Node, plan_resources
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


def test_the_slurm_script_is_valid_bash() -> None:
    subprocess.run(["bash", "-n", str(ROOT / "deploy" / "slurm.sh")], check=True)


def test_the_slurm_script_can_resume_a_sweep() -> None:
    script = (ROOT / "deploy" / "slurm.sh").read_text()
    words = shlex.split(script.partition("exec rlx sweep ")[2].partition('"$@"')[0])
    parser = sweep.argument_parser()
    args, given = options.parse(parser, [*words, "--resume", "lr", "--storage", "/nfs/rlx"])
    sweep._check_options(parser, args, given)
