"""The trained networks: policy, critic and reference; how they are loaded, sharded and made to score responses.

`policy` has the networks, `logprobs` the log-probabilities of tokens, `packing` rows without padding; `loading` reads
Hugging Face folders and `folder` looks at their files, `lora` adds adapters, `fsdp` and `tensor_parallel` spread them
over processes, which may share packed rows, too (`rlx.mesh.SequenceGroup`); `tiny` makes the small model that rlx
starts from by default.
Left out: optimizers and losses (training, algorithms), generation (rollout).

Imports of rlx: config, mesh, types.

Shapes: B responses, L tokens of prompt and response, T response tokens, N response tokens of all responses together,
H hidden size, V vocabulary.

Example:
    import torch
    from rlx.models.loading import load_policy
    from rlx.models.policy import ResponseTokens

    policy = load_policy("storage/models/mine", head=None)
    ids, prompt_lengths = torch.tensor([[5, 6, 7, 8]]), torch.tensor([2])  # one response of two tokens: 7 and 8
    output = policy(ResponseTokens.of(ids, prompt_lengths, torch.ones(1, 2)), temperature=1.0, entropy=True)
    assert output.logprobs.shape == output.entropy.shape == (1, 2)
"""
