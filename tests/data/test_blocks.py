"""Prompt tables in the blocks of Ray Data, and the shares of real Train workers."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import ray.data
import ray.train
from ray.train.torch import TorchTrainer

from rlx.config.errors import ConfigError
from rlx.data import ray_data, stream
from rlx.data.blocks import BlockRows, RankShares, SmallRows, rows_of
from rlx.data.stream import PromptRows, PromptStream, Share, TableRows
from rlx.types import Prompt

pytestmark = pytest.mark.usefixtures("ray_cluster")
ROWS = 50


def records(count: int = ROWS) -> list[dict[str, Any]]:
    return [{"question": f"q{i}", "answer": f"{i}", "token_ids": [i] * (1 + i % 3)} for i in range(count)]


def dataset(blocks: int) -> ray.data.Dataset:
    def as_int32(batch: pa.Table) -> pa.Table:
        return batch.set_column(2, "token_ids", batch["token_ids"].cast(pa.list_(pa.int32())))

    ray_data.configure()
    made = ray.data.from_items(records(), override_num_blocks=blocks)
    return made.map_batches(as_int32, batch_format="pyarrow", batch_size=None, num_cpus=0).materialize()


@pytest.fixture(scope="module", params=[(1, 0), (7, 0), (7, 2**20)], ids=["one block", "blocks", "small"])
def rows(request: pytest.FixtureRequest, ray_cluster: None) -> PromptRows:
    blocks, small = request.param
    found = rows_of(dataset(blocks), small)
    assert isinstance(found, SmallRows if small else BlockRows)
    return found


@pytest.fixture(scope="module")
def in_memory() -> TableRows:
    return TableRows(pa.Table.from_pylist(records()))


def test_rows_of_blocks_are_those_of_the_table(rows: PromptRows, in_memory: TableRows) -> None:
    assert len(rows) == ROWS and rows.digest == in_memory.digest
    ids = [49, 0, 7, 7, 8, 60, 99, 3]
    assert stream.prompts(rows, ids) == stream.prompts(in_memory, ids)
    assert stream.prompts(rows, []) == []


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_steps_are_the_same_on_any_ranks_and_blocks_from_any_cursor(
    rows: PromptRows, in_memory: TableRows, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "WINDOW", 9)
    alone = PromptStream(in_memory, 1)
    start = alone.cursor(37)
    expected: list[list[Prompt]] = []
    alone.seek(start)
    expected = [alone.next(6) for _ in range(6)]
    shares = [Share(rows, rank, ranks).stream(1) for rank in range(ranks)]
    for share in shares:
        share.seek(start)
    for step in expected:
        assert [one for row in zip(*(share.next(6) for share in shares), strict=True) for one in row] == step
    assert {str(share.cursor()) for share in shares} == {str(alone.cursor())}


def test_rows_with_other_tokens_are_refused_at_a_cursor(rows: PromptRows) -> None:
    changed = records()
    changed[20]["token_ids"] = [7]
    with pytest.raises(ConfigError, match="their texts or tokens differ"):
        PromptStream(rows, 1).seek(PromptStream(TableRows(pa.Table.from_pylist(changed)), 1).cursor())


@pytest.mark.slow
def test_what_a_rank_is_sent_are_the_rows_that_it_asked_for() -> None:
    rows = rows_of(dataset(5), small=0)
    assert isinstance(rows, BlockRows)
    assert [count for (summary,) in [ray.get(list(rows.summaries))] for count, _ in summary] == [10] * 5
    fetched = stream.picked_rows(ray.get(rows.blocks[1]), np.array([3, 1]))
    assert fetched["question"].to_pylist() == ["q13", "q11"]
    assert fetched.get_total_buffer_size() < ray.get(rows.blocks[1]).get_total_buffer_size() / 2


def test_neighbours_of_a_tensor_parallel_group_get_the_same_rows() -> None:
    views = RankShares(neighbours=2).configure({"train": dataset(1), "held_out": dataset(1)}, 6, None, None)
    assert [(view["train"].rank, view["train"].ranks) for view in views] == [
        (0, 3),
        (0, 3),
        (1, 3),
        (1, 3),
        (2, 3),
        (2, 3),
    ]
    assert all(view.keys() == {"train", "held_out"} for view in views)


@pytest.mark.slow
def test_real_train_workers_get_their_shares(tmp_path: Path, in_memory: TableRows) -> None:
    def worker(given: dict[str, Any]) -> None:
        context, share = ray.train.get_context(), ray.train.get_dataset_shard("train")
        assert isinstance(share, Share)
        stream = share.stream(seed=1)
        steps = [[prompt.id for prompt in stream.next(6)] for _ in range(4)]
        held_out = [prompt.id for prompt in ray.train.get_dataset_shard("held_out").in_order()]
        found = f"{context.get_world_rank()}: {type(share.rows).__name__} {steps} {held_out}"
        Path(given["folder"], str(context.get_world_rank())).write_text(found)

    trainer = TorchTrainer(
        worker,
        train_loop_config={"folder": str(tmp_path)},
        datasets={"train": dataset(3), "held_out": dataset(1)},
        dataset_config=RankShares(small=0),
        scaling_config=ray.train.ScalingConfig(num_workers=2, resources_per_worker={"CPU": 0.1}),
        run_config=ray.train.RunConfig(name="shares", storage_path=str(tmp_path / "train")),
    )
    trainer.fit()
    for rank in range(2):
        own = PromptStream(in_memory, 1, rank, 2)
        steps = [[prompt.id for prompt in own.next(6)] for _ in range(4)]
        assert (tmp_path / str(rank)).read_text() == f"{rank}: BlockRows {steps} {list(range(rank, ROWS, 2))}"


@pytest.mark.cluster
def test_on_two_nodes_files_are_read_on_this_one_and_rows_picked_where_they_lie() -> None:
    """With 0 free CPUs; see two_nodes.py."""
    script = Path(__file__).with_name("two_nodes.py")
    found = subprocess.run([sys.executable, str(script)], check=True, stdout=subprocess.PIPE, text=True, timeout=300)
    seen = json.loads(found.stdout.splitlines()[-1])
    assert seen["read"]["here"] == [[True, 800]]
    assert [is_here for is_here, _ in seen["read"]["anywhere"]] == [False, True]
    assert (seen["nodes"], seen["rows"]) == (2, 800)
    assert seen["questions"] == [f"{piece}?" for piece in range(8)]
