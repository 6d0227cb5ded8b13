"""Rows shared by sequence-parallel neighbours against one process: scores and gradients, updates, whole runs."""

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import OnRanks
from test_packing import shared
from test_tensor_parallel import learnt, settings_of
from test_update import PACKED, WAYS, updated
from torch import Tensor

from rlx.mesh import Mesh, Sharing
from rlx.models.loading import load_policy
from rlx.training import setup


# --- what is exchanged


def exchanged(rank: int, ranks: int, tokens: int, heads: int) -> list[Tensor]:
    """A row's states `[P, heads, 3]`: this process's tokens, all tokens in its heads, the tokens again, and gathered."""
    sharing = Sharing.of(Mesh.of("cpu", 1, ranks).mesh["sequence"])
    whole = torch.arange(tokens * heads * 3.0).view(tokens, heads, 3)
    own = sharing.share(whole)
    in_heads = sharing.to_heads(own, tokens)
    return [own, in_heads, sharing.to_tokens(in_heads), sharing.gather(own, tokens)]


@pytest.mark.parametrize(("tokens", "heads"), [(6, 4), (7, 2), (1, 6)])
def test_tokens_are_exchanged_for_heads_and_back(tokens: int, heads: int, on_ranks: OnRanks) -> None:
    whole = torch.arange(tokens * heads * 3.0).view(tokens, heads, 3)
    found = on_ranks(2, exchanged, tokens, heads)
    each = -(-tokens // 2)
    for rank, (own, in_heads, back, gathered) in enumerate(found):
        assert torch.equal(in_heads, whole.chunk(2, 1)[rank]) and torch.equal(gathered, whole)
        inside = max(0, min(each, tokens - rank * each))
        assert len(own) == len(back) == each
        assert torch.equal(back[:inside], whole[rank * each :][:inside]) and torch.equal(back[:inside], own[:inside])


def test_fewer_heads_than_neighbours_are_repeated(on_ranks: OnRanks) -> None:
    whole = torch.arange(5 * 2 * 3.0).view(5, 2, 3)
    found = [in_heads for _, in_heads, _, _ in on_ranks(4, exchanged, 5, 2)]
    assert [torch.equal(states, whole[:, rank // 2, None]) for rank, states in enumerate(found)] == [True] * 4


# --- scores and gradients


def config_of(ranks: int, sp: int, **chosen: Any) -> Any:
    return settings_of(ranks, 1, parallel={"sp": sp}, **chosen | {"train": {"prompts_per_step": 24, "packing": True}})


def learnt_on_ranks(rank: int, ranks: int, path: str, sp: int, more: dict[str, Any]) -> dict[str, Any]:
    """What a policy with a value head and a critic say of completions that share prompts, and gradients of a loss.

    And how many tokens a layer of the policy has seen.
    """
    with_head = {"critic": "head", "value_head_init": "normal", "reference": "none"}
    grid = Mesh.of("cpu", 1, sp)
    found: dict[str, Any] = {}
    for model in (with_head, with_head | {"critic": "separate"}):
        config = config_of(ranks, sp, model=model | more, algorithm={"kl_coef": 0})
        trained, _ = setup.build_models(config, path, grid.mesh)
        policy: Any = trained["policy"].model
        layer, seen = policy.lm.base_model.layers[0].mlp, list[int]()
        layer.register_forward_hook(lambda module, given, output, seen=seen: seen.append(output.shape[1]))
        tokens, weights = shared(), weights_of(shared())
        output = policy(tokens, 0.7, True)
        values = trained["critic"].model(tokens) if "critic" in trained else output.values
        with torch.no_grad():
            found["entropy alone"] = policy(tokens, 0.7, True).entropy
        ((output.logprobs + 0.1 * output.entropy + values) * weights).sum().backward()
        found |= {f"{model['critic']}/logprobs": output.logprobs, f"{model['critic']}/values": values}
        for name, each in trained.items():
            gradients = {n: p.grad.full_tensor() for n, p in each.model.named_parameters() if p.requires_grad}
            found |= {f"{model['critic']}/{name}/{n}": gradient.clone() for n, gradient in gradients.items()}
        found["seen"] = seen[0]
    return {name: value.detach() if isinstance(value, Tensor) else value for name, value in found.items()}


def weights_of(tokens: Any) -> Tensor:
    return torch.randn(tokens.mask.shape, generator=torch.Generator().manual_seed(6))


@pytest.mark.parametrize(("ranks", "sp"), [(2, 2), (4, 2), (4, 4)])
def test_scores_and_gradients_are_those_of_one_process(ranks: int, sp: int, on_ranks: OnRanks, tiny_model: Path) -> None:
    (alone,), found = (on_ranks(n, learnt_on_ranks, str(tiny_model), s, {}) for n, s in ((1, 1), (ranks, sp)))
    row = alone.pop("seen")
    assert row % sp  # the last process's share is filled up
    for each in found:
        assert each.pop("seen") == -(-row // sp)
        assert each.keys() == alone.keys()
        worst = max(float((each[name] - alone[name]).abs().max()) for name in alone)
        print(f"{ranks} ranks, sp {sp}: largest difference {worst:.1e}")
        for name, expected in alone.items():
            scale = max(1.0, float(expected.abs().max()))
            torch.testing.assert_close(each[name], expected, atol=1e-5 * scale, rtol=0, msg=lambda m, n=name: f"{n}: {m}")
        torch.testing.assert_close(each, found[0], atol=0, rtol=0)  # to the last bit
