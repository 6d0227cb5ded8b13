"""Rows on several GPUs, layers cut over several, both, and packed rows shared by several, against one GPU, in bfloat16;
run it with `pytest -m gpu tests/gpu`.

Two replicas of two neighbours take four GPUs, or two that ranks share: NCCL_MULTI_RANK_GPU_ENABLE=1, with NCCL from
2.31 on (an older torch takes a newer one by LD_PRELOAD).
"""

import functools
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from shared import OnRanks
from test_balance import assert_dealt, dealt_out
from test_selection import FIRST, MISSING, VARIED, assert_chosen, chosen
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from rlx.config import loading
from rlx.mesh import Mesh
from rlx.models import fsdp
from rlx.models.packing import pack_row
from rlx.models.policy import ResponseTokens
from rlx.training.setup.models import build_models

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

SHARES_GPUS = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
ROWS, PROMPT, WIDTH, VOCABULARY = 8, 32, 96, 4096
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 8,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "tie_word_embeddings": True,
}


def stepped(rank: int, ranks: int, tp: int, sp: int, folder: str, path: str, results: str) -> None:
    """On `ranks` ranks, each `tp` x `sp` of them neighbours: scores of their rows, which are packed where neighbours
    share them, gradients, and all weights after three optimizer steps."""
    os.environ |= {"NCCL_NVLS_ENABLE": "0"}
    torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    settings = loading.from_tree(
        {
            "model": {"dtype": "bfloat16", "critic": "head", "value_head_init": "normal", "reference": "none"},
            "algorithm": {"kl_coef": 0},
            "parallel": {"tp": tp, "sp": sp},
            "scaling": {"num_workers": ranks},
        }
    )
    grid = Mesh.of("cuda", tp, sp)
    trained = build_models(settings, path, grid.mesh).trained
    policy: Any = trained["policy"].model
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, VOCABULARY, (ROWS, PROMPT + WIDTH), generator=generator).cuda()
    ids = ids[grid.dp_rank :: grid.dp_size]
    found: dict[str, Tensor] = {}
    for number in range(3):
        mask = torch.ones(len(ids), WIDTH).cuda()
        lengths = torch.full((len(ids),), PROMPT).cuda()
        tokens = ResponseTokens.of(ids, lengths, mask)
        if sp > 1:
            row = pack_row(ids, lengths.long(), mask.sum(1).long(), torch.arange(len(ids)).cuda(), tokens.token_index)
            tokens = tokens._replace(packing=row)
        scored = policy(tokens, 1.0)
        (scored.values.square().mean() - scored.logprobs.mean()).backward()
        if number == 0:
            found = {"logprobs": scored.logprobs.detach(), "values": scored.values.detach()}
            found |= {f"gradient {name}": fsdp.full_tensor(p.grad).clone() for name, p in policy.named_parameters()}
        found[f"norm {number}"] = fsdp.clip_gradients(policy, 1.0)
        trained["policy"].optimizer.step()
        trained["policy"].optimizer.zero_grad()
    found |= {f"weight {name}": fsdp.full_tensor(p.detach()).clone() for name, p in policy.named_parameters()}
    torch.save({name: tensor.cpu() for name, tensor in found.items()}, Path(results, f"{ranks}-{tp}-{sp}-{rank}"))
    dist.destroy_process_group()


def check_room(ranks: int) -> None:
    if torch.cuda.device_count() < ranks and not SHARES_GPUS:
        pytest.skip(f"needs {ranks} GPUs")


Results = Callable[[int, int, int], list[dict[str, Tensor]]]


@pytest.fixture(scope="module")
def on_gpus(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What each of so many ranks, of which so many are neighbours, has found."""
    place = tmp_path_factory.mktemp("parallel")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        Qwen3ForCausalLM(Qwen3Config(**SIZES)).save_pretrained(place / "model")

    @functools.cache
    def run(ranks: int, tp: int, sp: int) -> list[dict[str, Tensor]]:
        with tempfile.TemporaryDirectory() as folder:
            shape = ranks, tp, sp
            torch.multiprocessing.spawn(stepped, (*shape, folder, str(place / "model"), str(place)), nprocs=ranks)
        return [torch.load(place / f"{ranks}-{tp}-{sp}-{rank}") for rank in range(ranks)]

    return run


@pytest.mark.parametrize(("ranks", "tp", "sp"), [(2, 1, 1), (2, 2, 1), (4, 2, 1), (2, 1, 2), (4, 1, 2)])
def test_several_gpus_score_and_learn_as_one(ranks: int, tp: int, sp: int, on_gpus: Results) -> None:
    check_room(ranks)
    (alone,), (first, *others) = on_gpus(1, 1, 1), on_gpus(ranks, tp, sp)
    replicas = ranks // (tp * sp)
    gap = (first["logprobs"] - alone["logprobs"][::replicas]).abs()
    print(f"mean |delta logprob| {gap.mean():.4f}, largest {gap.max():.4f}")
    assert gap.mean() <= 0.02
    assert tp == 1 or gap.mean() > 0  # else nothing was cut
    for name, expected in alone.items():
        if name.startswith("gradient"):
            apart = (first[name] - expected).norm() / expected.norm()
            assert apart <= 0.1, (name, float(apart))
        if name == "norm 0":  # later ones follow an optimizer step, where AdamW makes tiny differences large
            assert float(first[name]) == pytest.approx(float(expected), rel=0.02)
    alike = set(first) - (set() if replicas == 1 else {"logprobs", "values"})  # of other rows
    unlike = {name for name in alike for other in others if not torch.equal(first[name], other[name])}
    assert unlike == set()  # what all hold alike stays alike, to the last bit


@pytest.mark.parametrize(("ranks", "tp"), [(2, 1), (4, 2)])
def test_completions_travel_between_gpus(ranks: int, tp: int, on_ranks: OnRanks) -> None:
    check_room(ranks)
    assert_dealt(on_ranks(ranks, dealt_out, tp, "cuda"), ranks, tp)
    assert_chosen(on_ranks(ranks, chosen, tp, "cuda", len(VARIED)), tp, MISSING, FIRST)
