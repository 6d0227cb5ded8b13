"""A process with a virtual Ray cluster of three nodes: `python virtual_cluster.py FUNCTION` calls one of the functions
below with the JSON on its standard input and prints what it gives as the last line.
"""

import contextlib
import json
import logging
import os
import sys
import time
from typing import Any

import ray
from ray import tune
from ray.cluster_utils import Cluster
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

NODES = ({"num_cpus": 4, "num_gpus": 2}, {"num_cpus": 3, "num_gpus": 2}, {"num_cpus": 2, "num_gpus": 0})
MiB = 2**20


def placed(plans: list[dict[str, Any]]) -> list[bool]:
    """Whether Ray places as many of each plan as it says would fit, in both orders, and not one more in both."""
    return [_is_right(plan["groups"], plan["strategy"], plan["fits"]) for plan in plans]


def _is_right(pair: list[list[dict[str, float]]], strategy: str, count: int) -> bool:
    more = count + 1
    return (
        _are_placed(pair * count, strategy)
        and _are_placed([pair[0]] * count + [pair[1]] * count, strategy)
        and not (_are_placed(pair * more, strategy) and _are_placed([pair[0]] * more + [pair[1]] * more, strategy))
    )


def _are_placed(bundles: list[list[dict[str, float]]], strategy: str) -> bool:
    """Whether Ray places all of these groups, one after the other."""
    groups: list[PlacementGroup] = []
    for each in bundles:
        groups.append(placement_group(each, strategy))
        if not _is_ready(groups[-1], patient=len(groups) < len(bundles)):
            break
    count = sum(placement_group_table(group)["state"] == "CREATED" for group in groups)
    for group in groups:
        remove_placement_group(group)
    _wait_until_empty()
    return count == len(bundles)


def _is_ready(group: PlacementGroup, patient: bool) -> bool:
    """Whether it comes to be placed; the impatient are content with one attempt of Ray's that failed."""
    deadline = time.monotonic() + (5 if patient else 1)
    while (row := placement_group_table(group))["state"] != "CREATED" and time.monotonic() < deadline:
        if not patient and row["stats"]["scheduling_state"] in ("NO_RESOURCES", "INFEASIBLE"):
            return False
        time.sleep(0.01)
    return row["state"] == "CREATED"


def _wait_until_empty() -> None:
    while any(ray.available_resources().get(name) != ray.cluster_resources()[name] for name in ("CPU", "GPU")):
        time.sleep(0.02)


def sweep(plans: list[list[dict[str, float]]]) -> list[tuple[int, float, float]]:
    """Runs one cheap trial for each plan, as many at once as Tune can; the number, start and end of each."""

    def trial(config: dict[str, Any]) -> None:
        began = time.time()
        time.sleep(0.3)
        tune.report({"number": config["number"], "began": began, "ended": time.time()})

    def needed(config: dict[str, Any]) -> tune.PlacementGroupFactory:
        return tune.PlacementGroupFactory([{}, *plans[config["number"]]])

    tuner = tune.Tuner(
        tune.with_resources(trial, needed),
        param_space={"number": tune.grid_search(list(range(len(plans))))},
        run_config=tune.RunConfig(verbose=0),
    )
    return [tuple(result.metrics[key] for key in ("number", "began", "ended")) for result in tuner.fit()]


def main() -> None:
    os.environ["RAY_AIR_NEW_OUTPUT"] = "0"
    logging.getLogger("ray").setLevel(logging.ERROR)
    given = json.load(sys.stdin)
    with contextlib.redirect_stdout(sys.stderr):
        memory = {"object_store_memory": 80 * MiB}
        often = {"raylet_report_resources_period_milliseconds": 10}  # else 100, which each plan would wait for
        head = NODES[0] | memory | {"include_dashboard": False, "_system_config": often}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        for node in NODES[1:]:
            cluster.add_node(**node, **memory)
        ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
        result = {"placed": placed, "sweep": sweep}[sys.argv[1]](given)
        ray.shutdown()
        cluster.shutdown()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
