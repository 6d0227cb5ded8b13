"""What of a rank's objects follows from the config alone."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from rlx.config.errors import ConfigError
from rlx.config.loading import from_tree
from rlx.models.policy import Policy
from rlx.training.setup import can_pack, threads

SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 8,
    "vocab_size": 9,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


@pytest.mark.parametrize(("share", "expected"), [({"CPU": 0.5}, 1), ({"CPU": 1}, 1), ({"CPU": 1.9}, 2), ({"x": 1}, 1)])
def test_a_worker_computes_with_as_many_threads_as_its_share_of_cpus(share: dict[str, float], expected: int) -> None:
    assert threads(from_tree({"scaling": {"resources_per_worker": share}}).scaling) == expected


def test_updates_of_models_that_cannot_be_packed_are_padded_unless_packing_was_asked_for() -> None:
    plain, window = Policy(LlamaForCausalLM(LlamaConfig(**SIZES))), Policy(MistralForCausalLM(MistralConfig(**SIZES)))
    for is_asked in (False, True):
        assert can_pack(plain, "mine", is_asked)
    assert not can_pack(window, "mine", is_asked=False)
    with pytest.raises(ConfigError, match=r"train\.packing: model\.path mine: some of its layers do not attend to all"):
        can_pack(window, "mine", is_asked=True)
    ids = torch.tensor([[1, 2, 3]])  # the trial left the model as it was
    assert window.lm(input_ids=ids).logits.shape == (1, 3, 9)
    assert (plain.lm.config._attn_implementation, plain.packs) == ("sdpa", False)
