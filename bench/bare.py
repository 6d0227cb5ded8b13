"""The baselines: vLLM without rlx, and a training loop without rlx, as one would write them by hand.

The loop is transformers' model with sdpa attention, sequences sorted by length and packed into micro-batches, no output
layer where nothing is scored, its logits in chunks and never computed twice, fused AdamW, clipped gradients. In
bfloat16 the weights that are trained are float32 and the model holds a copy of them. Left out: everything that makes
it reinforcement learning (old log-probabilities, ratios, advantages), sharding, statistics.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from measure import Memory, now, operations
from torch import Tensor, nn

from rlx.config.run import RunConfig
from rlx.rollout.vllm_engine import with_newer_runner
from rlx.types import Sampling

_CHUNK = 1024  # tokens whose logits are held at a time

Request = tuple[tuple[int, ...], int | None]
"""the token ids of a prompt, and the seed of its completion, if it has one"""
Sequence_ = tuple[int, list[int]]
"""how many tokens are the prompt, and all tokens"""


def rollout(
    path: str, options: dict[str, Any], sampling: Sampling, rounds: Sequence[Sequence[Request]]
) -> list[tuple[int, float]]:
    """vLLM's own LLM.generate, round after round: tokens drawn and seconds of each."""
    import warnings

    warnings.filterwarnings("ignore")
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    llm = with_newer_runner(
        lambda: LLM(model=path, skip_tokenizer_init=True, disable_log_stats=True, seed=0, **options)
    )
    results = []
    for requests in rounds:
        prompts = [{"prompt_token_ids": list(prompt)} for prompt, _ in requests]
        params = [
            SamplingParams(
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                max_tokens=sampling.max_tokens,
                stop_token_ids=list(sampling.stop_token_ids),
                seed=seed,
                logprobs=0 if sampling.logprobs else None,
                flat_logprobs=sampling.logprobs,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            for _, seed in requests
        ]
        llm.reset_prefix_cache()  # as a weight update does
        started = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        results.append((sum(len(o.outputs[0].token_ids) for o in outputs), time.perf_counter() - started))
    return results


@dataclass(frozen=True)
class Micro:
    """A micro-batch, on the device."""

    ids: Tensor  # [B, L], padded on the right: attention is causal, so no mask is needed
    before: Tensor  # [N], of each response token the place in the flat [B x L] hidden states that scores it
    targets: Tensor  # [N], the response tokens


class Loop:
    """The training loop: one optimizer step per mini-batch, over each of the models that the config trains."""

    def __init__(self, config: RunConfig, path: str) -> None:
        self._config = config
        self._device = torch.device("cuda" if config.scaling.use_gpu else "cpu")
        dtype = getattr(torch, config.model.dtype)
        policy = _Policy(config, path, dtype, self._device)
        self.policy = policy.model
        self.learners: list[_Learner] = [policy]
        if config.resolved_critic == "separate":
            self.learners.append(_Critic(config, path, dtype, self._device))
        self._memory = Memory(self._device)

    def load(self, sequences: Sequence[Sequence_]) -> int:
        """Takes the sequences to train on in every round; gives the tokens that a round trains on."""
        train = self._config.train
        size = len(sequences) // train.num_minibatches
        parts = [sequences[i * size : (i + 1) * size] for i in range(train.num_minibatches)]
        self._steps = [micro_batches(part, train.micro_batch_tokens, self._device) for part in parts] * train.ppo_epochs
        self._sequences = sequences
        return train.ppo_epochs * sum(len(tokens) for _, tokens in sequences)

    def round(self) -> float:
        """Seconds of all optimizer steps on the sequences."""
        started = now(self._device)
        for micros in self._steps:
            count = sum(len(micro.targets) for micro in micros)
            for micro in micros:
                for learner in self.learners:
                    learner.backward(micro, count)
            for learner in self.learners:
                learner.step()
        return now(self._device) - started

    def forget_memory(self) -> None:
        self._memory.forget()

    def peak_memory(self) -> int:
        """In bytes, see Memory."""
        return self._memory.peak()

    def flops(self) -> float:
        """Floating-point operations that the models need for a round, see `operations`."""
        lengths = [len(tokens) for _, tokens in self._sequences]
        scored = sum(len(tokens) - prompt for prompt, tokens in self._sequences)
        return self._config.train.ppo_epochs * sum(learner.flops(lengths, scored) for learner in self.learners)


class _Learner:
    """A model with its float32 weights and their optimizer."""

    def __init__(self, config: RunConfig, model: Any, head: nn.Module, dtype: torch.dtype) -> None:
        self.model, self.head = model, head
        self.backbone: Any = model.base_model
        self._limit = config.train.max_grad_norm
        if config.train.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.train()
        if config.resolved_compile:
            for layer in self.backbone.layers:
                layer.compile(dynamic=True)
            self.loss = torch.compile(self.loss, dynamic=True)  # type: ignore[method-assign]
        self._held = list(dict.fromkeys([*model.parameters(), *head.parameters()]))
        self._copied = dtype != torch.float32
        self.weights = [nn.Parameter(p.detach().float()) for p in self._held] if self._copied else self._held
        betas, decay = config.train.adam_betas, config.train.weight_decay
        self._optimizer = torch.optim.AdamW(
            self.weights, lr=config.train.actor_lr, betas=betas, weight_decay=decay, fused=True
        )

    def backward(self, micro: Micro, count: int) -> None:
        """Adds the gradients of a micro-batch to those of the float32 weights; `count` divides the loss."""
        hidden = self.backbone(input_ids=micro.ids, use_cache=False).last_hidden_state
        hidden = hidden.flatten(0, 1).index_select(0, micro.before)
        scored = hidden.detach().requires_grad_()
        for start in range(0, len(scored), _CHUNK):
            chunk = slice(start, start + _CHUNK)
            (self.loss(scored[chunk], micro.targets[chunk]) / count).backward()
        hidden.backward(scored.grad)
        if self._copied:
            for weight, held in zip(self.weights, self._held, strict=True):
                assert held.grad is not None
                weight.grad = held.grad.float() if weight.grad is None else weight.grad.add_(held.grad)
                held.grad = None

    def step(self) -> None:
        nn.utils.clip_grad_norm_(self.weights, self._limit)
        self._optimizer.step()
        self._optimizer.zero_grad()
        if self._copied:
            with torch.no_grad():
                torch._foreach_copy_(self._held, self.weights)

    def loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        raise NotImplementedError

    def flops(self, lengths: Sequence[int], scored: int) -> float:
        """See `Loop.flops`; one pass over sequences of these lengths, of whose tokens so many are scored."""
        head = sum(p.numel() for p in self.head.parameters())
        return operations(self.backbone, head, sum(lengths), scored, sum(n * n for n in lengths))


class _Policy(_Learner):
    def __init__(self, config: RunConfig, path: str, dtype: torch.dtype, device: torch.device) -> None:
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="sdpa").eval()
        model.to(device)
        super().__init__(config, model, model.get_output_embeddings(), dtype)

    def loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(hidden).float(), targets, reduction="sum")


class _Critic(_Learner):
    def __init__(self, config: RunConfig, path: str, dtype: torch.dtype, device: torch.device) -> None:
        from transformers import AutoModel

        model: Any = AutoModel.from_pretrained(path, dtype=dtype, attn_implementation="sdpa").eval()
        head = nn.Linear(model.config.hidden_size, 1, dtype=dtype)
        super().__init__(config, model.to(device), head.to(device), dtype)

    def loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return self.head(hidden).float().square().sum()


def micro_batches(sequences: Sequence[Sequence_], budget: int, device: torch.device) -> list[Micro]:
    """The sequences by length, as many in a micro-batch as make at most `budget` tokens with padding."""
    groups: list[list[Sequence_]] = [[]]
    for one in sorted(sequences, key=lambda one: len(one[1])):
        if groups[-1] and (len(groups[-1]) + 1) * len(one[1]) > budget:
            groups.append([])
        groups[-1].append(one)
    return [_micro(group, device) for group in groups]


def _micro(group: Sequence[Sequence_], device: torch.device) -> Micro:
    ids = nn.utils.rnn.pad_sequence([torch.tensor(tokens) for _, tokens in group], batch_first=True)
    width = ids.shape[1]
    before = [row * width + i for row, (prompt, all_) in enumerate(group) for i in range(prompt - 1, len(all_) - 1)]
    targets = [token for prompt, tokens in group for token in tokens[prompt:]]
    return Micro(ids.to(device), torch.tensor(before, device=device), torch.tensor(targets, device=device))
