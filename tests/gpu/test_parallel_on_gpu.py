"""Layers cut over two GPUs against the whole model on one, in bfloat16; run it with `pytest -m gpu tests/gpu`."""

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from rlx import config, model, roles
from rlx.parallel import Grid

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

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


def stepped(rank: int, ranks: int, folder: str, path: str, results: str) -> None:
    """On `ranks` GPUs, all of them neighbours: scores, their gradients, and all weights after three optimizer steps."""
    os.environ |= {"NCCL_NVLS_ENABLE": "0"}
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{folder}/store{ranks}", rank=rank, world_size=ranks)
    settings = config.from_tree(
        {
            "model": {"dtype": "bfloat16", "critic": "head", "value_head_init": "normal", "reference": "none"},
            "algorithm": {"kl_coef": 0},
            "parallel": {"tp": ranks},
            "scaling": {"num_workers": ranks},
        }
    )
    trained, _ = roles.models(settings, path, Grid.of("cuda", ranks).mesh)
    policy: Any = trained["policy"].model
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, VOCABULARY, (ROWS, PROMPT + WIDTH), generator=generator).cuda()
    found: dict[str, Tensor] = {}
    for number in range(3):
        mask = torch.ones(ROWS, WIDTH).cuda()
        scored = policy(ids, torch.full((ROWS,), PROMPT).cuda(), mask, mask.nonzero(as_tuple=True), 1.0)
        (scored.values.square().mean() - scored.logprobs.mean()).backward()
        if number == 0:
            found = {"logprobs": scored.logprobs.detach(), "values": scored.values.detach()}
            found |= {f"gradient {name}": model.gathered(p.grad).clone() for name, p in policy.named_parameters()}
        found[f"norm {number}"] = model.clip_gradients(policy, 1.0)
        trained["policy"].optimizer.step()
        trained["policy"].optimizer.zero_grad()
    found |= {f"weight {name}": model.gathered(p.detach()).clone() for name, p in policy.named_parameters()}
    torch.save({name: tensor.cpu() for name, tensor in found.items()}, Path(results, f"{ranks}-{rank}"))
    dist.destroy_process_group()


def test_two_gpus_score_and_learn_as_one(tmp_path: Path) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        Qwen3ForCausalLM(Qwen3Config(**SIZES)).save_pretrained(tmp_path / "model")
    for ranks in (1, 2):
        with tempfile.TemporaryDirectory() as folder:
            given = (ranks, folder, str(tmp_path / "model"), str(tmp_path))
            torch.multiprocessing.spawn(stepped, given, nprocs=ranks)
    alone, first, second = (torch.load(tmp_path / name) for name in ("1-0", "2-0", "2-1"))
    gap = (first["logprobs"] - alone["logprobs"]).abs()
    print(f"mean |delta logprob| {gap.mean():.4f}, largest {gap.max():.4f}")
    assert 0 < gap.mean() <= 0.02
    for name, expected in alone.items():
        if name.startswith("gradient"):
            apart = (first[name] - expected).norm() / expected.norm()
            assert apart <= 0.1, (name, float(apart))
        if name == "norm 0":  # later ones follow an optimizer step, where AdamW makes tiny differences large
            assert float(first[name]) == pytest.approx(float(expected), rel=0.02)
    unlike = [name for name in first if not torch.equal(first[name], second[name])]
    assert unlike == []  # what neighbours hold alike stays alike, to the last bit
