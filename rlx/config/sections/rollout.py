"""The settings of generation: engines, sampling, how weights reach the engines, and what the policy talks to."""

from __future__ import annotations

import json
from typing import Annotated, Any, ClassVar, Literal

import pydantic
from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from rlx.config.sections.base import Arguments, Fraction, NonEmptyText, Resources, Seconds, Section
from rlx.config.sections.schedule import ScheduledSection

Penalty = Annotated[float, Field(ge=-2, le=2)]
HARMLESS_SAMPLING = ("repetition_detection", "skip_reading_prefix_cache")
"""entries of rollout.sampling_options that leave the distribution of tokens as it is; all others may alter it"""

TransportName = Literal["auto", "object_store", "gloo"]


class RolloutConfig(ScheduledSection):
    """Generation: the engines, sampling, and the transport of weights to the engines."""

    CHANGING: ClassVar[tuple[str, ...]] = ("temperature", "top_p", "min_p")

    num_engines: PositiveInt = 1
    """number of vLLM engines, each in its own actor; unset: 1, with scaling.use_gpu scaling.num_workers divided by
    tensor_parallel"""
    resources_per_engine: Resources = Field(default_factory=lambda: {"CPU": 0.5})
    """resources that Ray reserves for each engine, e.g. {CPU: 1, GPU: 1}; unset: {CPU: 0.5}, with scaling.use_gpu and
    placement separate CPU: 1 and as many GPUs as tensor_parallel. GPU: 0 is for engines on CPUs beside such workers"""
    label_selector: dict[str, str] = Field(default_factory=dict)
    """labels that the nodes of the engines must have; see scaling.label_selector"""
    tensor_parallel: PositiveInt = 1
    """GPUs that each engine's model is split over; a resources_per_engine.GPU that is given must be the same number"""
    transport: TransportName = "auto"
    """how weights reach the engines. auto: CUDA IPC on the same GPU, shared memory on the same CPU node, NCCL to other
    GPUs, otherwise Ray's object store; object_store, gloo: for all engines, where NCCL or CUDA IPC do not work"""
    temperature: PositiveFloat = 1.0
    """sampling temperature; the trainer divides its logits by it too"""
    top_p: Fraction = 1.0
    """nucleus sampling; a value below 1 needs algorithm.rollout_correction"""
    top_k: int = Field(default=-1, ge=-1)
    """sample among the k most probable tokens, -1 for all; needs algorithm.rollout_correction"""
    min_p: float = Field(default=0.0, ge=0, lt=1)
    """sample among tokens with at least this fraction of the largest probability; needs algorithm.rollout_correction"""
    min_tokens: NonNegativeInt = 0
    """shortest response in tokens: no stop token is drawn before; needs algorithm.rollout_correction"""
    repetition_penalty: PositiveFloat = 1.0
    """above 1, tokens of prompt and response so far become less likely; needs algorithm.rollout_correction"""
    presence_penalty: Penalty = 0.0
    """subtracted from the logits of tokens that the response has; needs algorithm.rollout_correction"""
    frequency_penalty: Penalty = 0.0
    """subtracted from a token's logit for each time that the response has it; needs algorithm.rollout_correction"""
    bad_words: tuple[NonEmptyText, ...] = ()
    """texts whose last token is never drawn after the others; needs algorithm.rollout_correction"""
    stop: tuple[NonEmptyText, ...] = ()
    """texts that end a response, e.g. ["</answer>"]; the response keeps the token that completes one. On the command
    line commas are between texts as they are typed; one in brackets or quotes is YAML: '["[END]"]'"""
    sampling_options: Arguments = Field(default_factory=dict)
    """further arguments of vLLM's SamplingParams, e.g. {logit_bias: {11: -5}}; those that may alter the distribution
    need algorithm.rollout_correction"""
    engine_options: Arguments = Field(default_factory=dict)
    """further arguments of vLLM's EngineArgs, e.g. {max_num_batched_tokens: 16384}; refused where log-probabilities
    would change unseen"""
    logprobs_every: PositiveInt = 10
    """steps between those in which engines report log-probabilities for mismatch/* alone, which takes up to a third of
    a decode step; every step where training needs them (rollout_correction, old_logprobs rollout, max_staleness)"""
    max_tokens: PositiveInt = 1024
    """longest response in tokens; unset: 1024, or what data.max_prompt_tokens leaves of a shorter context; of an
    episode all tokens after its prompt, see environment.max_turns"""
    max_staleness: NonNegativeInt = 0
    """number of steps that generation runs ahead of training, and so the largest age of its weights in steps; 0:
    strictly on-policy"""
    partial_rollouts: bool = False
    """unfinished completions continue with new weights when a weight update arrives; otherwise they finish first with
    the old weights"""
    num_chunks: PositiveInt = 1
    """number of chunks that a step's prompts are generated in; the trainer scores one chunk while the engines generate
    the next"""
    placement: Literal["separate", "colocated"] = "separate"
    """separate: engines have their own GPUs, or fractions of GPUs; colocated: each engine shares the GPU of a worker,
    and sleeps while the worker trains"""
    max_num_seqs: PositiveInt = 256
    """completions that an engine generates at the same time"""
    kv_cache_mib: PositiveInt = 1024
    """size of the engine's KV cache on CPU, in MiB"""
    gpu_memory_utilization: Fraction = 0.5
    """fraction of a GPU's memory that the engine uses"""
    alternate: bool = False
    """an engine waits while another one on its GPU draws, for half of timeout_s at most; --interleave sets it"""
    enforce_eager: bool = False
    """no CUDA graphs on GPU: starts faster, runs slower (CPU engines are always eager)"""
    timeout_s: Seconds = 600.0
    """an engine that makes no step for so long is replaced, and its prompts go to another engine"""
    sync_timeout_s: Seconds = 120.0
    """an engine that takes longer for a weight update is replaced"""
    retries: NonNegativeInt = 2
    """how often one round of generation waits for the engines to restart after all of them have failed"""

    @property
    def altering(self) -> list[str]:
        """The settings in use with which engines draw from another distribution than that of the model's logits."""
        limits = {"top_p": self.top_p < 1, "top_k": self.top_k > 0, "min_p": self.min_p, "min_tokens": self.min_tokens}
        penalties = {"presence_penalty": self.presence_penalty, "frequency_penalty": self.frequency_penalty}
        used = limits | penalties | {"repetition_penalty": self.repetition_penalty != 1, "bad_words": self.bad_words}
        options = [f"sampling_options.{name}" for name in self.sampling_options if name not in HARMLESS_SAMPLING]
        return [f"rollout.{name}" for name in [*(name for name, is_used in used.items() if is_used), *options]]


class EnvironmentConfig(Section):
    """What the policy talks to, how long its episodes are, and the processes of the environments."""

    name: NonEmptyText | None = None
    """calculator, python, guess_number, treasure, code, gymnasium, or module:Class, a class of your own; unset: none,
    each completion is one turn. See docs/environments.md"""
    params: Arguments = Field(default={})
    """arguments of that class"""
    max_turns: PositiveInt = 8
    """turns of the policy in an episode, at most; rollout.max_tokens has all tokens of an episode after its prompt,
    those of the environment too, and all that a new context reads again"""
    turn_tokens: PositiveInt | None = None
    """longest turn of the policy in tokens; unset: what is left of rollout.max_tokens"""
    rewards: Literal["end", "turn"] = "end"
    """end: an episode has one reward at its end, the sum of all; turn: each where it was given, which gae and
    reinforce++ tell apart"""
    history: Literal["template", "extend"] = "template"
    """where the chat template changes earlier turns of a conversation, e.g. takes thoughts out. template: the policy
    reads the changed conversation from there on, in a new context, which uses up rollout.max_tokens as a whole; extend:
    it reads on from what it has drawn"""
    num_actors: PositiveInt = 1
    """number of processes that environments run in, which all workers share"""
    resources_per_actor: Resources = Field(default_factory=lambda: {"CPU": 0.25})
    """resources that Ray reserves for each of them"""
    label_selector: dict[str, str] = Field(default_factory=dict)
    """labels that their nodes must have; see scaling.label_selector"""
    concurrency: PositiveInt = 64
    """calls that one of them answers at the same time"""
    timeout_s: Seconds = 30.0
    """longest call of an environment; after a longer one of a plain method, which cannot be ended, its process is
    replaced"""
    memory_mb: PositiveInt | None = None
    """MiB of memory that one of these processes may use for its environments; unset: no limit"""
    retries: NonNegativeInt = 1
    """how often an episode is repeated on a fresh instance because a call failed; then it ends there, and the losses
    leave it out"""
    repeat: Annotated[float, Field(ge=0, le=1)] = 0.01
    """share of the episodes that a second instance has as well, to see whether the environment is deterministic; the
    losses leave out an episode that comes out differently"""

    @pydantic.model_validator(mode="before")
    @classmethod
    def _read_name(cls, given: Any) -> Any:
        return {"name": given} if isinstance(given, str) else given

    @property
    def identity(self) -> str:
        """The settings that decide what an episode is, as text; empty without an environment."""
        own = self.model_dump(include={"name", "params", "max_turns", "turn_tokens", "history"}, mode="json")
        return json.dumps(own, sort_keys=True) if self.name else ""
