"""The trained networks: policy, critic and reference; how they are loaded, sharded and made to score responses.

`policy` has the networks and `logprobs` the log-probabilities of tokens; `loading` reads Hugging Face folders, `lora`
adds adapters, `fsdp` and `tensor_parallel` spread them over processes; `tiny` makes the small model that rlx
starts from by default. Left out: optimizers and losses (training, algorithms), generation (rollout).
May import rlx.config and rlx.types.

Shapes: B responses, L tokens of prompt and response, T response tokens, N response tokens of all responses together,
H hidden size, V vocabulary.

Example:
    from rlx.models.loading import load_policy

    policy = load_policy("storage/models/smollm2", head=None)
    # ids [B, L], prompt_lengths [B], mask [B, T], token_index: rows and columns [N] of the ones in the mask
    output = policy(ids, prompt_lengths, mask, mask.nonzero(as_tuple=True), temperature=1.0, entropy=True)
    output.logprobs, output.entropy  # [B, T] each
"""
