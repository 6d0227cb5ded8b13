"""What fits on a cluster: by hand, and against what Ray itself places on a virtual one."""

import json
import os
import random
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import ray

from rlx.cluster import connection, resources
from rlx.cluster.placement import Bundle, Node
from rlx.cluster.resources import ResourcePlan, RoleLabels, check_room, plan_resources, sharing_gpus, wait_for_room
from rlx.config.errors import ConfigError
from rlx.config.loading import from_tree, with_overrides

CLUSTER = Path(__file__).with_name("virtual_cluster.py")
ONE_GPU, BIG = {"CPU": 1.0, "GPU": 1.0}, {"CPU": 64.0, "GPU": 2.0}


def gpus(*parts: float) -> list[Bundle]:
    return [{"GPU": part} for part in parts]


def nodes(*resources: dict[str, float]) -> list[Node]:
    return [Node(each) for each in resources]


# ---------------------------------------------------------------------------------------------------------------------
# By hand


@pytest.mark.parametrize(
    ("workers", "engines", "node", "count"),
    [
        ([{"CPU": 0.5}], [{"CPU": 0.5}], {"CPU": 2.0}, 2),
        ([{"CPU": 0.5}], [{"CPU": 0.5}], {"CPU": 1.9}, 1),
        ([{"CPU": 0.1}] * 3, [{"CPU": 0.1}], {"CPU": 1.2}, 3),  # 1.2 / 0.4 is a little less than 3 in floating point
        ([ONE_GPU] * 2, gpus(1), {"CPU": 64.0, "GPU": 8.0}, 2),
        ([ONE_GPU], [{"CPU": 1.0}], {"CPU": 64.0}, 0),
        (gpus(2), gpus(1), {"GPU": 8.0}, 2),  # 3 + 3, and 2 are left
        (gpus(0.6, 0.6), gpus(0.4, 0.4), {"GPU": 2.0}, 0),  # Ray puts both engines on the first GPU
        (gpus(0.6, 0.6), gpus(0.4, 0.4), {"GPU": 3.0}, 1),
        (gpus(0.6, 0.6, 0.6), [], {"GPU": 2.0}, 0),  # 1.8, but a third 0.6 would lie on two GPUs
        (gpus(0.25, 0.25), gpus(0.5), {"GPU": 2.0}, 2),
        (gpus(0.5), gpus(1), {"GPU": 2.0}, 1),  # 0.5 + 1 twice is 3
        (gpus(0.3), gpus(0.3), {"GPU": 1.0}, 1),
        (gpus(0.75), gpus(0.25), {"GPU": 4.0}, 3),  # four engines that start first are on one GPU
        (gpus(1), gpus(0.25), {"GPU": 4.0}, 3),
        ([{"CPU": 1.0, "GPU": 0.25}] * 2, [{"CPU": 1.0}], {"CPU": 6.0, "GPU": 8.0}, 2),  # the CPUs end first
        ([{"CPU": 1.0, "TPU": 1.0}], [{"CPU": 1.0}], {"CPU": 64.0, "TPU": 3.0}, 3),
    ],
)
def test_whole_plans_that_fit_on_a_node(
    workers: list[Bundle], engines: list[Bundle], node: dict[str, float], count: int
) -> None:
    assert ResourcePlan(workers, engines).fits(nodes(node)) == count


def test_each_bundle_is_on_one_node() -> None:
    two_and_one = ResourcePlan([{"CPU": 2.0}], [{"CPU": 1.0}])
    assert two_and_one.fits(nodes(*[{"CPU": 1.0}] * 8)) == 0
    assert two_and_one.fits(nodes({"CPU": 2.0}, {"CPU": 1.0})) == 0  # Ray puts the engine on the emptier node
    assert (
        two_and_one.fits(nodes(*[{"CPU": 3.0}, {"CPU": 2.0}, {"CPU": 1.0}])) == 1
    )  # the second engine takes from the 2
    assert ResourcePlan(gpus(2), gpus(2)).fits(nodes(*[{"GPU": 3.0}] * 4)) == 2  # a third GPU of a node is of no use


def test_the_count_ends_where_it_is_told_to() -> None:
    assert ResourcePlan([{"CPU": 1.0}], []).fits(nodes(*[{"CPU": 1000.0}]), most=3) == 3


def test_what_the_head_chooses_by_sums_a_node_may_be_unable_to_cut() -> None:
    """The first node has 2 GPUs, which is enough for three times 0.6 in sum: Ray tries that, and nothing else."""
    four = ResourcePlan(gpus(0.6, 0.6, 0.6, 0.6), [])
    assert four.fits(nodes(*[{"GPU": 2.0}, {"GPU": 2.0}])) == 0
    assert four.fits(nodes(*[{"GPU": 4.0}])) == 1


@pytest.mark.parametrize(
    ("strategy", "counts"), [("PACK", (2, 0)), ("STRICT_PACK", (2, 0)), ("SPREAD", (2, 1)), ("STRICT_SPREAD", (0, 1))]
)
def test_a_strategy_rules_nodes_out(strategy: str, counts: tuple[int, int]) -> None:
    """It holds for each of the two groups."""
    two = ResourcePlan([{"CPU": 1.0}] * 2, [{"CPU": 0.5}] * 2, strategy=strategy)
    one_node, two_nodes = nodes({"CPU": 6.0}), nodes({"CPU": 1.75}, {"CPU": 1.75})
    assert (two.fits(one_node), two.fits(two_nodes)) == counts


def test_indices_are_those_of_the_reserved_bundles() -> None:
    mixed = ResourcePlan(gpus(0.4), [{"CPU": 1.0}, {"CPU": 2.0}], gpus(2))
    assert mixed.bundles == [{"GPU": 2}, {"CPU": 2.0}, {"CPU": 1.0}]  # the workers are in a group of Ray Train's
    assert mixed.indices == ([2, 1], [0], [])


def test_environments_have_bundles_and_labels_of_their_own() -> None:
    plan = ResourcePlan(
        [{"CPU": 1.0}],
        [{"CPU": 1.0}],
        gpus(0.5),
        labels=RoleLabels(environments={"kind": "cpu"}),
        environments=[{"CPU": 0.5}, {"CPU": 0.5}],
    )
    assert plan.bundles == [{"GPU": 0.5}, {"CPU": 1.0}, {"CPU": 0.5}, {"CPU": 0.5}]
    assert plan.indices == ([1], [0], [2, 3])
    assert plan.selectors == [{}, {}, {"kind": "cpu"}, {"kind": "cpu"}]
    assert str(plan) == "1 worker and 1 engine and 1 reward model and 2 environments"
    assert plan.total() == {"CPU": 3.0, "GPU": 0.5}


def test_engines_that_start_first_leave_room_for_all_workers() -> None:
    """One run after another fits twice. But two engines that start first take one node each, and no pair of workers
    finds another with room for both."""
    plan = ResourcePlan([{"CPU": 1.0}] * 2, [{"CPU": 1.0}], strategy="STRICT_PACK")
    assert plan.fits(nodes({"CPU": 6.0})) == 2
    assert plan.fits(nodes({"CPU": 2.0}, {"CPU": 2.0}, {"CPU": 2.0})) == 1


def test_a_plan_says_what_it_is_made_of() -> None:
    small = ResourcePlan([{"CPU": 0.5}] * 2, [{"CPU": 1.0, "GPU": 1.0}])
    assert str(small) == "2 workers and 1 engine" and small.total() == {"CPU": 2.0, "GPU": 1.0}
    assert str(ResourcePlan([], [], [{"CPU": 1.0}])) == "1 reward model"


def test_labels_rule_nodes_out() -> None:
    labels = RoleLabels(workers={"market": "!spot"}, engines={"kind": "in(a, b)"})
    plan = ResourcePlan([{"CPU": 1.0}], [{"CPU": 1.0}], labels=labels)
    spot, steady = (Node({"CPU": 4.0}, {"market": each, "kind": "a"}) for each in ("spot", "demand"))
    assert (plan.fits([spot]), plan.fits([steady]), plan.fits([spot, steady])) == (0, 2, 3)
    assert plan.fits([steady, Node({"CPU": 4.0}, {"kind": "c"})]) == 4
    assert plan.selectors == [{"kind": "in(a, b)"}]


def test_engines_that_share_gpus_reserve_nothing_of_their_own() -> None:
    shared = ResourcePlan([{"CPU": 2.0, "GPU": 1.0}] * 2, [{"CPU": 1.0, "GPU": 1.0}] * 2, gpus(0.5), colocated=True)
    assert shared.bundles == [{"GPU": 0.5}] and shared.indices == ([], [0], [])
    assert shared.total() == {"CPU": 4.0, "GPU": 2.5}
    assert shared.fits(nodes(*[{"CPU": 8.0, "GPU": 5.0}])) == 2  # four GPUs for the pairs, one for both reward models
    assert shared.fits(nodes(*[{"CPU": 8.0, "GPU": 4.0}])) == 1


# ---------------------------------------------------------------------------------------------------------------------
# From a config


def configured(**changes: Any) -> ResourcePlan:
    return plan_resources(from_tree({"train": {"prompts_per_step": 8}} | changes))


def test_a_worker_on_a_gpu_has_a_whole_one_unless_told_otherwise() -> None:
    assert configured(scaling={"num_workers": 2, "use_gpu": True}).workers == [{"CPU": 0.5, "GPU": 1.0}] * 2
    part = {"use_gpu": True, "resources_per_worker": {"CPU": 1, "GPU": 0.5}}
    assert configured(scaling=part).workers == [{"CPU": 1.0, "GPU": 0.5}]
    assert configured(scaling={"placement_strategy": "SPREAD"}).strategy == "SPREAD"
    together = configured(scaling={"use_gpu": True}, rollout={"placement": "colocated"})
    assert together.bundles == [] and together.workers == [{"CPU": 1.0, "GPU": 1.0}]
    assert together.engines == [{"CPU": 0.5, "GPU": 1.0}]


def test_workers_and_engines_need_gpus_of_the_kind_that_was_asked_for() -> None:
    def node(kind: str) -> dict[str, float]:
        return {"CPU": 64.0, "GPU": 8.0, f"accelerator_type:{kind}": 1.0}

    scaling = {"use_gpu": True, "num_workers": 1, "accelerator_type": "H200"}
    apart = configured(scaling=scaling, rollout={"resources_per_engine": {"GPU": 1}})
    shared = configured(scaling=scaling, rollout={"resources_per_engine": {"CPU": 1}, "placement": "colocated"})
    assert (apart.fits(nodes(node("A100"))), shared.fits(nodes(node("A100")))) == (0, 0)
    assert (apart.fits(nodes(node("H200"), node("A100"))), shared.fits(nodes(node("H200"), node("A100")))) == (4, 8)
    assert "accelerator_type:H200" not in apart.workers[0]  # Ray Train adds it


def test_a_run_on_gpus_needs_as_many_for_engines_as_for_workers() -> None:
    batch = {"prompts_per_step": 32}
    eight = configured(scaling={"use_gpu": True, "num_workers": 4}, train=batch)
    assert eight.engines == [ONE_GPU] * 4 and eight.total()["GPU"] == 8
    turns = configured(scaling={"use_gpu": True, "num_workers": 8}, rollout={"placement": "colocated"}, train=batch)
    assert len(turns.engines) == 8 and turns.total()["GPU"] == 8


def test_engines_without_a_gpu_beside_workers_on_gpus_are_refused_unless_they_are_said_to_be_on_cpus() -> None:
    scaling = {"use_gpu": True}
    line = "engine has no GPU, and workers have .*: --rollout.resources-per-engine.GPU 2 adds it; 0 is for engines on"
    with pytest.raises(ConfigError, match=line):
        configured(scaling=scaling, rollout={"resources_per_engine": {"CPU": 4}, "tensor_parallel": 2})
    on_cpu = configured(scaling=scaling, rollout={"resources_per_engine": {"CPU": 4, "GPU": 0}})
    assert on_cpu.total() == {"CPU": 4.5, "GPU": 1.0} and on_cpu.fits(nodes({"CPU": 8.0}, ONE_GPU)) == 1
    assert configured(rollout={"resources_per_engine": {"CPU": 4}}).total()["CPU"] == 4.5


def test_one_and_a_half_gpus_are_refused() -> None:
    message = r"scaling\.resources_per_worker: 1\.5 GPUs are neither a whole number nor a part of one"
    with pytest.raises(ConfigError, match=message):
        configured(scaling={"resources_per_worker": {"CPU": 1, "GPU": 1.5}})
    assert configured(scaling={"resources_per_worker": {"CPU": 1, "GPU": 2.0}}).total()["GPU"] == 2


ENGINE_ON_GPU: dict[str, Any] = {"scaling": {"use_gpu": True}}


def sharing(runs: int, tree: dict[str, Any]) -> dict[str, Any]:
    config = from_tree(tree)
    return sharing_gpus(runs, config.scaling, config.rollout, config.reward)


def test_runs_that_share_gpus_have_parts_of_them() -> None:
    assert sharing(2, ENGINE_ON_GPU) == {
        "scaling.resources_per_worker": {"CPU": 0.5, "GPU": 0.5},
        "rollout.resources_per_engine": {"CPU": 1.0, "GPU": 0.5},
        "rollout.gpu_memory_utilization": 0.25,
        "rollout.alternate": True,
    }
    model = {"model": "m", "resources_per_model": {"CPU": 1, "GPU": 0.5}, "functions": {"model": 1}}
    thirds = sharing(3, ENGINE_ON_GPU | {"reward": model})
    assert thirds["rollout.resources_per_engine"]["GPU"] == 0.3333
    assert thirds["reward.resources_per_model"] == {"CPU": 1.0, "GPU": 0.1666}
    two_gpus = nodes({"CPU": 64.0, "GPU": 2.0})
    trees = [ENGINE_ON_GPU, *(with_overrides(ENGINE_ON_GPU, sharing(runs, ENGINE_ON_GPU)) for runs in (2, 3))]
    assert [plan_resources(from_tree(tree)).fits(two_gpus) for tree in trees] == [1, 2, 3]


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (
            {"scaling": {"use_gpu": False}},
            r"--interleave 2: runs use no GPU \(scaling.use_gpu\); --max-concurrent is for",
        ),
        ({"rollout": {"placement": "colocated"}}, "--interleave 2: with rollout.placement colocated one run already"),
        ({"scaling": {"use_gpu": True, "num_workers": 2}}, "--interleave 2: Ray may give two of the 2 workers"),
        ({"rollout": {"tensor_parallel": 2}}, "--interleave 2: rollout.tensor_parallel takes 2 GPUs; Ray shares"),
        (
            {"scaling": {"use_gpu": True, "resources_per_worker": {"GPU": 2}}},
            "--interleave 2: scaling.resources_per_worker has 2 GPUs; Ray shares",
        ),
    ],
)
def test_gpus_that_cannot_be_shared_are_refused(settings: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        sharing(2, {"scaling": {"use_gpu": True}} | settings)


def test_a_kind_of_gpu_needs_workers_on_gpus() -> None:
    with pytest.raises(
        ConfigError, match=r"scaling\.accelerator_type H200 is a kind of GPU: it needs scaling\.use_gpu"
    ):
        configured(scaling={"accelerator_type": "H200"})


# ---------------------------------------------------------------------------------------------------------------------
# Nodes that are still to come

SPOT = ResourcePlan([{"CPU": 1.0}], [{"CPU": 2.0}], labels=RoleLabels(workers={"market": "spot"}))


@dataclass
class Growing:
    """A cluster that gets its second node when it was looked at so many times, and what an autoscaler is asked for."""

    looks_before: int
    asked: list[Any] = field(default_factory=list)

    def nodes(self) -> list[Node]:
        self.looks_before -= 1
        late = [Node({"CPU": 4.0}, {"market": "spot"})] if self.looks_before < 0 else []
        return [Node({"CPU": 4.0}), *late]

    def ask(self, bundles: list[Bundle], bundle_label_selectors: list[dict[str, str]] | None = None) -> None:
        self.asked.append((bundles, bundle_label_selectors))


@pytest.fixture
def growing(monkeypatch: pytest.MonkeyPatch) -> Growing:
    cluster = Growing(3)
    monkeypatch.setattr(resources, "cluster_nodes", cluster.nodes)
    monkeypatch.setattr(resources, "_LOOK_S", 0.001)
    monkeypatch.setattr("ray.autoscaler.sdk.request_resources", cluster.ask)
    return cluster


def test_a_plan_waits_for_the_nodes_that_it_asks_for(growing: Growing) -> None:
    said: list[str] = []
    wait_for_room(SPOT, 60.0, said.append)
    labels = "a node with the labels market=spot, which none of 1 node has"
    assert said == [f"waiting for nodes, 60 s at most: 1 worker and 1 engine need {labels}"]
    assert growing.asked == [([{"CPU": 2.0}, {"CPU": 1.0}], [{}, {"market": "spot"}]), ([], None)]


def test_a_plan_that_waited_in_vain_asks_for_nothing_more(growing: Growing) -> None:
    growing.looks_before = 10**6
    with pytest.raises(ConfigError, match="scaling: 1 worker and 1 engine need a node with the labels market=spot"):
        wait_for_room(SPOT, 0.01, lambda message: None)
    assert growing.asked[-1] == ([], None)


def test_a_cluster_that_cannot_grow_is_not_waited_for(growing: Growing) -> None:
    growing.looks_before = 10**6
    with pytest.raises(ConfigError, match="scaling: 1 worker and 1 engine need a node with the labels market=spot"):
        wait_for_room(SPOT, 0.0, pytest.fail)
    assert growing.asked == []


def test_a_plan_with_room_neither_waits_nor_asks(growing: Growing) -> None:
    growing.looks_before = 0
    wait_for_room(SPOT, 0.0, pytest.fail)
    assert growing.asked == []


def test_a_plan_that_fits_is_let_through(ray_cluster: None) -> None:
    check_room(ResourcePlan([{"CPU": 2.0}], [{"CPU": 2.0}]))


@pytest.mark.parametrize(
    ("needed", "line"),
    [
        (
            ResourcePlan([{"CPU": 3.0}], [{"CPU": 1.5}]),
            "scaling: 1 worker and 1 engine need 4.5 CPU but the cluster has 4",
        ),
        (ResourcePlan(gpus(0.5), []), "scaling: 1 worker need 0.5 GPU but the cluster has 0"),
        (
            ResourcePlan([{"CPU": 5.0, "GPU": 1.0}], []),
            "scaling: 1 worker need 5 CPU but the cluster has 4, 1 GPU but the cluster has 0",
        ),
        (
            ResourcePlan([{"CPU": 1.0}] * 2, [], strategy="STRICT_SPREAD"),
            "scaling: 2 workers need 1 CPU, 1 CPU, which STRICT_SPREAD cannot place on 1 node with 4 CPU",
        ),
    ],
)
def test_a_plan_the_cluster_can_never_meet_is_refused_with_the_numbers(
    ray_cluster: None, needed: ResourcePlan, line: str
) -> None:
    with pytest.raises(ConfigError) as error:
        check_room(needed)
    assert str(error.value).startswith(line)


# ---------------------------------------------------------------------------------------------------------------------
# Against Ray


def random_plan(draws: random.Random) -> ResourcePlan:
    def drawn(most: int) -> list[Bundle]:
        gpu = draws.choice([0, 0.25, 0.4, 0.5, 0.6, 1, 2])
        bundle = {"CPU": draws.choice([0.5, 1.0, 1.5, 2.0])} | ({"GPU": gpu} if gpu else {})
        return [bundle] * draws.randint(1, most)

    return ResourcePlan(drawn(4), drawn(3))


def on_virtual_cluster(what: str, given: Any) -> Any:
    """What a function of virtual_cluster.py gives, called in a process of its own: this one has a cluster already."""
    environment = os.environ | {"RAY_ADDRESS": ""}
    done = subprocess.run(
        [sys.executable, str(CLUSTER), what], input=json.dumps(given), text=True, capture_output=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


NODES: list[dict[str, float]] = [{"CPU": 4.0, "GPU": 2.0}, {"CPU": 3.0, "GPU": 2.0}, {"CPU": 2.0}]
STRATEGIES = ("PACK", "STRICT_PACK", "SPREAD", "STRICT_SPREAD")


@pytest.mark.slow
def test_ray_places_as_many_plans_as_fit() -> None:
    draws = random.Random(0)
    plans = [replace(random_plan(draws), strategy=strategy) for strategy in STRATEGIES for _ in range(50)]
    fits = [each.fits(nodes(*NODES)) for each in plans]
    assert {0, 1, 2, 4} <= set(fits)
    given = [
        {"groups": [p.bundles, p.workers], "strategy": p.strategy, "fits": n} for p, n in zip(plans, fits, strict=True)
    ]
    assert [plan for plan, right in zip(given, on_virtual_cluster("placed", given), strict=True) if not right] == []


@pytest.mark.slow
def test_fifty_random_plans_end_and_never_more_at_once_than_there_is_room_for() -> None:
    draws = random.Random(1)
    plans = [each for each in (random_plan(draws) for _ in range(500)) if each.fits(nodes(*NODES), 1)][:50]
    trials = on_virtual_cluster("sweep", [each.bundles for each in plans])
    assert sorted(number for number, _, _ in trials) == list(range(50))
    running = [[n for n, began, ended in trials if began <= moment < ended] for _, moment, _ in trials]
    together = [[bundle for n in numbers for bundle in plans[n].bundles] for numbers in running]
    room = {name: sum(node.get(name, 0.0) for node in NODES) for name in ("CPU", "GPU")}
    for bundles in together:
        assert all(sum(bundle.get(name, 0.0) for bundle in bundles) <= room[name] for name in room), bundles
    assert max(map(len, running)) > 1


def test_a_cluster_that_starts_too_slowly_is_one_line_that_says_what_to_try(monkeypatch: pytest.MonkeyPatch) -> None:
    def start() -> None:
        raise Exception("The current node timed out during startup. This could happen\nbecause of the GCS.")

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)  # other tests of this process have a cluster
    monkeypatch.setattr(connection, "start_cluster", start)
    monkeypatch.setattr(connection, "quiet_environment", lambda: None)
    config = from_tree({})
    with pytest.raises(ConfigError, match=r"^Ray does not start here, see .*ray: The current node timed .*try again"):
        connection.connect(config, plan_resources(config))
