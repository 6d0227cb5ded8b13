"""A process with a virtual Ray cluster of two nodes; it prints as JSON where rows were read, tokenized and picked.

The driver's node has one CPU and all of them are taken, as by the workers of a run.
"""

import json
import logging
import tempfile
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import ray
from ray.cluster_utils import Cluster

from rlx.config.sections.data import DataConfig
from rlx.data import prompts, ray_data
from rlx.data.blocks import BlockRows, rows_of
from rlx.data.stored.columns import SCHEMA
from rlx.data.stream import PromptStream
from rlx.models import tiny

MiB = 2**20


def read_node(piece: int) -> Iterator[pa.Table]:
    node = ray.get_runtime_context().get_node_id()
    yield pa.Table.from_pylist([{"question": f"{piece}?" * 1000, "answer": node}] * 100, SCHEMA)


def main() -> dict[str, Any]:
    driver = ray.get_runtime_context().get_node_id()
    here = ray_data.read_pieces(range(8), read_node, SCHEMA, here=True)
    anywhere = ray_data.read_pieces(range(8), read_node, SCHEMA, here=False)
    read = {
        name: sorted(Counter(row["answer"] == driver for row in rows.take_all()).items())
        for name, rows in [("here", here), ("anywhere", anywhere)]
    }
    with tempfile.TemporaryDirectory() as folder:
        tiny.build_tokenizer().save_pretrained(folder)
        table = prompts.tokenize_rows(
            anywhere, DataConfig(max_prompt_tokens=10_000), prompts.TokenizerSource.of(folder)
        )
    rows = rows_of(table, small=0)
    assert isinstance(rows, BlockRows)
    stream = PromptStream(rows, 0, 0, 2)
    questions = {prompt.question[:2] for prompt in stream.next(800)}
    return {"read": read, "nodes": len(rows.nodes), "rows": len(rows), "questions": sorted(questions)}


if __name__ == "__main__":
    head = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": 100 * MiB}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    cluster.add_node(num_cpus=2, object_store_memory=100 * MiB)
    ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
    taken = [ray.remote(num_cpus=1)(Counter).remote() for _ in range(3)]
    result = main()
    ray.shutdown()
    cluster.shutdown()
    print(json.dumps(result))
