"""The benchmarks: what they refuse, what they tell, and that the bare loop does the work it is said to do."""

import json
import sys
import time
from contextlib import suppress
from dataclasses import fields
from pathlib import Path

import against_trl
import against_verl
import alike
import bare
import large_model
import measure
import psutil
import pytest
import random_models
import recipes
import rollout
import scaling
import step
import table
import torch
import update
import verl_settings
import workload
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from rlx.cluster.resources import plan_resources
from rlx.config.errors import ConfigError
from rlx.config.loading import from_tree, read_yaml, with_overrides
from rlx.config.run import RunConfig
from rlx.models import tiny

MAINS = {
    "rollout": rollout.main,
    "update": update.main,
    "step": step.main,
    "scaling": scaling.main,
    "against_trl": against_trl.main,
    "against_verl": against_verl.main,
}
SHAPE = LlamaConfig(
    vocab_size=40,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    tie_word_embeddings=True,
)
SEQUENCES = [(2, [5, 6, 7, 8]), (3, [9, 10, 11, 12, 13, 14, 15]), (1, [3, 4]), (4, [1, 2, 3, 4, 5])]


@pytest.fixture
def small_model(tmp_path: Path) -> str:
    torch.manual_seed(0)
    LlamaForCausalLM(SHAPE).save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


@pytest.fixture
def small_tokenizer(small_model: str) -> str:
    """The small model with rlx's tokenizer."""
    tiny.build_tokenizer().save_pretrained(small_model)
    return small_model


def settings(**given: object) -> RunConfig:
    more = {key.replace("__", "."): value for key, value in given.items()}
    return from_tree(with_overrides({}, workload.CPU | more))


@pytest.mark.parametrize(
    ("bench", "words", "said"),
    [
        ("rollout", ["--train.stepz", "3"], "unknown option --train.stepz; nearest: --train.steps"),
        ("rollout", ["--rollout.num-engines", "2"], "rollout.num_engines: bare vLLM is one engine"),
        ("rollout", ["--train.actor-lr", "0.1"], "leave it 0"),
        ("rollout", ["--rollout.max-staleness", "1"], "error: rollout.max_staleness: bare vLLM"),
        ("rollout", ["--rollout.num-chunks", "2"], "error: rollout.num_chunks: bare vLLM"),
        ("step", ["--rollout.max-staleness", "1"], "0 and 1 are measured"),
        ("update", ["--scaling.num-workers", "2"], "bench/scaling.py takes more"),
        ("update", ["--model.lora-rank", "4"], "no LoRA"),
        ("update", ["--steps", "0"], "--steps 0: expected a whole number"),
        ("update", ["--model.path", "./nowhere"], "model.path ./nowhere: no such folder"),
        ("update", ["--model.path", "qwen2-05b"], "nearest: qwen2-0.5b"),
        ("step", ["--train.steps", "many", "--skip", "overlap"], "train.steps"),
        ("scaling", ["--ranks", "2,1"], "--ranks 2,1: expected ascending numbers"),
        ("scaling", ["--scaling.num-workers", "2"], "--ranks says how many"),
        (
            "against_trl",
            ["--rollout.num-engines", "2"],
            "TRL is measured on one GPU at most: 1 worker and 2 engines",
        ),
        (
            "against_trl",
            ["--algorithm.advantage", "rloo"],
            "algorithm.advantage rloo: TRL does the same work only with",
        ),
        ("against_trl", ["--ahead"], "--ahead: TRL trains on one GPU and draws on another"),
        ("against_verl", [], "veRL needs a GPU: add --gpu"),
    ],
)
def test_bad_input_is_one_line(bench: str, words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert MAINS[bench](words) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ") and said in lines[0]


def test_without_trl_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(against_trl, "find_spec", lambda name: None)
    assert against_trl.main([]) == 1
    assert capsys.readouterr().err == "error: TRL is not installed here: pip install -e '.[bench]'\n"


def test_trl_is_given_the_same_work(tmp_path: Path) -> None:
    train = {
        "train__prompts_per_step": 6,
        "train__samples_per_prompt": 4,
        "train__num_minibatches": 2,
        "train__steps": 7,
    }
    given = against_trl.arguments(settings(**train, train__micro_batch_tokens=850, data__max_prompt_tokens=32))
    # 12 completions of at most 160 tokens to an optimizer step: 5 fit, 4 divide it.
    trl = pytest.importorskip("trl").GRPOConfig(output_dir=str(tmp_path), **given)
    assert trl.generation_batch_size == 24
    on_gpu = against_trl.arguments(from_tree(with_overrides({}, against_trl.GPU)))
    assert on_gpu.keys() <= {field.name for field in fields(trl)}
    assert (given["per_device_train_batch_size"], given["gradient_accumulation_steps"]) == (4, 3)
    assert (given["steps_per_generation"], given["max_steps"]) == (6, 14)
    assert (given["max_completion_length"], given["bf16"], given["use_cpu"]) == (128, False, True)


@pytest.mark.parametrize(("model", "count"), [("qwen2-0.5b", 3), ("qwen2-0.5b-ending", 2)])
def test_by_tokens_trl_makes_the_mini_batches_of_rlx(model: str, count: int, tmp_path: Path) -> None:
    """32 prompts of 128 tokens with 256 responses, of 256 tokens or of 128 in the mean, in micro-batches of 24 k."""
    config = from_tree(with_overrides({}, against_trl.GPU | {"model.path": f"/models/{model}"}))
    budget = against_trl.token_budget(config)
    most = config.train.micro_batch_tokens
    tokens = 32 * 128 + 256 * workload.mean_response(config)
    assert budget["gradient_accumulation_steps"] == count
    assert tokens <= count * budget["token_budget"] < tokens + count and budget["token_budget"] <= most
    trl = pytest.importorskip("trl.experimental.async_grpo").AsyncGRPOConfig(
        output_dir=str(tmp_path), **against_trl.asynchronous(config) | budget | {"bf16": False}
    )
    requests = trl.max_staleness * trl.per_device_train_batch_size * trl.gradient_accumulation_steps  # as TRL has it
    assert trl.max_inflight_tasks == -1 and 1024 <= requests < 1024 + 4 * count


def test_the_asynchronous_trainer_of_trl_is_given_the_same_work(tmp_path: Path) -> None:
    config = from_tree(with_overrides({}, against_trl.GPU | {"train.steps": 7}))
    given, step = against_trl.asynchronous(config), {"train__ppo_epochs": 2, "train__num_minibatches": 4}
    asynchronous = pytest.importorskip("trl.experimental.async_grpo").AsyncGRPOConfig
    assert given.keys() <= {field.name for field in fields(asynchronous)}
    assert (given["weight_sync_steps"], given["max_steps"], given["max_inflight_tasks"]) == (2, 18, 512)
    assert against_trl.asynchronous(settings(**step, train__steps=7))["weight_sync_steps"] == 8
    served = against_trl.serving(config)
    assert served[served.index("--max-model-len") + 1] == "384" and served[served.index("--dtype") + 1] == "bfloat16"


@pytest.mark.parametrize("steps", [1, 5])
def test_as_many_steps_of_rlx_are_counted_as_of_the_others(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for the run, whose responses are as long as the number of the step, but for the last, which does not
    count."""

    def run(config: RunConfig, tables: object, name: str) -> list[dict[str, float]]:
        lengths = [*range(workload.WARM + 1, config.train.steps), 1000]
        return [{"response/length_mean": float(length), workload.WALL: 1.0} for length in lengths]

    monkeypatch.setattr(workload, "counted_steps", run)
    figures = alike.by_rlx(settings(train__steps=workload.WARM + steps), {})
    assert figures["mean response, tokens"] == workload.WARM + (1 + steps) / 2  # the median of that many


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_ends_its_responses_at_each_token_with_the_same_chance(tied: bool) -> None:
    """Whatever its other weights add to the logits, here much: within what bfloat16 tells apart."""
    small = {"vocab_size": 2000, "num_hidden_layers": 2, "initializer_range": 0.05, "tie_word_embeddings": tied}
    with tiny.private_torch_state(0):
        tokenizer = tiny.build_tokenizer()
        model = random_models.ending(random_models.random_model("qwen2-30m", tokenizer, **small), 64).float()
        logits = model(input_ids=torch.randint(6, 2000, (2, 32), device=model.device)).logits
    chances = logits.softmax(-1)[..., tokenizer.eos_token_id].mean(0)
    assert (64 * chances).tolist() == pytest.approx([1.0] * 32, rel=0.08)


def test_a_known_model_ends_its_responses_after_half_of_the_most_tokens_in_the_mean() -> None:
    ending = from_tree(with_overrides({}, workload.GPU | {"model.path": "/models/qwen2-0.5b-ending"}))
    assert workload.mean_response(ending) == pytest.approx(128, abs=0.5)
    assert workload.mean_response(from_tree(with_overrides({}, workload.GPU))) == 256


@pytest.mark.parametrize(
    ("given", "folder", "said"),
    [
        ({"algorithm.aggregation": "constant"}, None, "aggregation constant: veRL has token_mean, sequence_mean"),
        ({}, "/nowhere", "--verl /nowhere: there is no veRL in it"),
        ({}, None, "veRL is not installed here; docs/performance.md says how, and --verl where it is"),
        ({"model.dtype": "float32"}, None, "model.dtype float32: veRL's trainer computes in bfloat16"),
    ],
)
def test_what_verl_cannot_do_is_refused(
    given: dict[str, object], folder: str | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [])
    config = from_tree(with_overrides({}, workload.GPU | workload.gpu_shares(1) | given))
    with pytest.raises(ConfigError, match=said):
        against_verl.check(config, folder)


def test_verl_is_given_the_same_work() -> None:
    train = {"train.prompts_per_step": 6, "train.samples_per_prompt": 4, "train.num_minibatches": 2, "train.steps": 7}
    given = verl_settings.overrides(from_tree(with_overrides({}, workload.GPU | workload.gpu_shares(1) | train)))
    assert not given.keys() & verl_settings.FIXED.keys()
    assert given["trainer.n_gpus_per_node"] == 1
    assert given["data.train_batch_size"] == 6 and given["actor_rollout_ref.rollout.n"] == 4
    assert given["actor_rollout_ref.actor.ppo_mini_batch_size"] == 3 and given["trainer.total_training_steps"] == 7
    assert given["actor_rollout_ref.actor.loss_agg_mode"] == "seq-mean-token-mean"
    assert given["actor_rollout_ref.rollout.max_model_len"] == 128 + 256
    # It ends a response where rlx does, as is its default.
    assert "actor_rollout_ref.rollout.ignore_eos" not in given | verl_settings.FIXED


@pytest.mark.parametrize(
    ("way", "gib", "times"),
    [("packed", 0.0, 2), ("packed", 79.6, 2), ("packed, liger", 139.8, 4), ("packed, liger, all logits", 139.8, 2)],
)
def test_passes_of_verl_without_gradients_take_what_the_gpu_holds(way: str, gib: float, times: int) -> None:
    config = from_tree(with_overrides({}, workload.GPU | workload.gpu_shares(1) | against_verl.PPO))
    given = verl_settings.overrides(config, verl_settings.wider(way, gib))
    names = ("actor_rollout_ref.rollout.log_prob", "actor_rollout_ref.ref.log_prob", "critic.forward")
    assert {given[f"{name}_max_token_len_per_gpu"] for name in names} == {times * 16_384}
    assert given["actor_rollout_ref.actor.ppo_max_token_len_per_gpu"] == 16_384


def test_verl_has_as_many_gpus_as_rlx() -> None:
    turns = {"rollout.placement": "colocated", "scaling.num_workers": 4, "rollout.num_engines": 4}
    apart = {"scaling.num_workers": 2, "rollout.num_engines": 2} | workload.gpu_shares(4)
    for settings in (turns, apart):
        config = from_tree(with_overrides({}, workload.GPU | settings))
        alike.check(config, "veRL", has_ppo=True, has_gpus=True)
        assert verl_settings.overrides(config)["trainer.n_gpus_per_node"] == 4
        with pytest.raises(ConfigError, match="TRL is measured on one GPU at most"):
            alike.check(config, "TRL")
    assert verl_settings.ASLEEP.keys() <= verl_settings.FIXED.keys()  # else they are none of veRL's names


def test_one_step_ahead_verl_has_gpus_of_its_own_for_engines() -> None:
    settings = workload.GPU | workload.gpu_shares(2) | alike.AHEAD | {"train.num_minibatches": 2}
    config = from_tree(with_overrides({}, settings))
    alike.check(config, "veRL", has_gpus=True, is_ahead=True)
    given = verl_settings.overrides(config)
    assert given["trainer.n_gpus_per_node"] == given["actor_rollout_ref.rollout.n_gpus_per_node"] == 1
    assert given["trainer.v1.trainer_mode"] == "separate_async"
    assert given["trainer.v1.separate_async.parameter_sync_step"] == 2  # optimizer steps of each batch
    with pytest.raises(ConfigError, match=r"rollout\.max_staleness 1: veRL does the same work only with 0"):
        alike.check(config, "veRL", has_gpus=True)
    on_policy = from_tree(with_overrides({}, workload.GPU | workload.gpu_shares(2)))
    with pytest.raises(ConfigError, match=r"rollout\.max_staleness 0: veRL does the same work only with 1"):
        alike.check(on_policy, "veRL", has_gpus=True, is_ahead=True)
    halves = from_tree(with_overrides({}, settings | workload.gpu_shares(1)))
    with pytest.raises(ConfigError, match="--ahead needs a GPU for each worker and each engine"):
        against_verl.check(halves, None, is_ahead=True)


def test_the_least_step_of_a_large_model_is_work_and_bytes_by_the_peaks(small_model: str) -> None:
    """Two layers, 16 wide: 4 x 2 responses of 5 tokens to prompts of 3, one worker and two engines."""
    train = {"train.prompts_per_step": 4, "train.samples_per_prompt": 2, "train.num_minibatches": 2}
    config = from_tree(with_overrides({}, large_model.CPU | train | {"rollout.num_engines": 2}))
    step = {"response/length_mean": 5.0, "tokens/update_per_s": 64.0, "time/update": 1.0}
    figures = large_model.shares(config, small_model, step | {"time/step": 2.0}, rate=4.8e12)
    body = 2 * (2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 24 + 2 * 16) + 16  # q and o, k and v, MLP, norms
    work = {tokens: 6 * (body * tokens + 40 * 16 * 40 + 2 * 16 * tokens**2 / 8) for tokens in (64, 52)}
    decode = 5 * (2 * (body + 40 * 16) + 2 * 2 * 2 * 4 * 2 * (3 + 2.5) * 8 / 2) / 4.8e12
    for words, tokens in (("all tokens", 64), ("prompts once", 52)):
        update = work[tokens] / measure.PEAK_FLOPS
        assert figures[f"MFU of the update, {words}"] == pytest.approx(update)
        assert figures[f"least step / step, {words}"] == pytest.approx((update * 7 / 6 + decode) / 2)
    unknown = large_model.shares(config, small_model, step | {"time/step": 2.0}, rate=None)
    assert set(unknown) == {"MFU of the update, all tokens", "MFU of the update, prompts once"}


def test_the_share_of_the_memory_roofline_is_bytes_by_bandwidth_and_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Qwen2 0.5B: 494,032,768 weights, the embedding being the output layer; 12,288 bytes of keys and values a token.

    A decode step of 512 sequences of 123 + 128 tokens reads 0.988 + 1.579 GB; 256 of them are 0.1369 s at 4.8 TB/s.
    """
    AutoConfig.for_model("qwen2", **random_models.SHAPES["qwen2-0.5b"]).save_pretrained(tmp_path)
    config, lm = from_tree(with_overrides({}, workload.GPU)), measure.shape_of(str(tmp_path))
    now = {"response/length_mean": 256, "response/length_max": 256, "time/rollout": 1.09, "time/generation": 1.0}
    now |= {"tokens/update_per_s": 512 * (123 + 256) / 0.9, "time/update": 0.9}
    least = step.least_s(config, lm, 4.8e12, now)
    assert least == pytest.approx(256 * (988_065_536 + 512 * 251 * 12_288) / 4.8e12)
    assert least == pytest.approx(0.1369, abs=1e-4)
    shorter = now | {"response/length_mean": 128, "tokens/update_per_s": 512 * (123 + 128) / 0.9}
    halved = 256 * 988_065_536 + 128 * 512 * 187 * 12_288  # weights as often, keys and values half as often
    assert step.least_s(config, lm, 4.8e12, shorter) == pytest.approx(halved / 4.8e12)
    epochs = from_tree(with_overrides({}, workload.GPU | {"train.ppo_epochs": 2, "rollout.num_engines": 2}))
    twice = now | {"tokens/update_per_s": 512 * (123 + 256) * 2 / 0.9}
    halves = 256 * (988_065_536 + 256 * 251 * 12_288)
    assert step.least_s(epochs, lm, 4.8e12, twice) == pytest.approx(halves / 4.8e12)
    # The row, on a GPU whose memory is known: what drawing took, by that.
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    row = {"decode, share of the memory roofline": pytest.approx(0.1369 / 1.09, abs=1e-4)}
    assert step.decoding(config, str(tmp_path), [now]) == row
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    assert not step.decoding(config, str(tmp_path), [now])


def test_the_speed_of_memory_is_known_by_the_name_of_the_gpu() -> None:
    assert measure.bandwidth("NVIDIA H200") == 4.8e12
    assert measure.bandwidth("NVIDIA H100 80GB HBM3") == 3.35e12
    assert measure.bandwidth("NVIDIA H100 PCIe") is None  # another memory
    assert measure.bandwidth("Tesla T4") is None
    assert not step.decoding(settings(), "/nowhere", [])  # on a CPU


def test_a_recipe_keeps_its_settings_but_for_model_and_prompts(tmp_path: Path) -> None:
    file = "experiments/configs/qwen3-1.7b-math.yaml"
    config = recipes.as_here(file, {"train.prompts_per_step": 64}, tmp_path / "questions.jsonl")
    recipe = from_tree(read_yaml(file))
    assert config.model.path == "qwen3-1.7b" and config.train.prompts_per_step == 64
    assert config.data.max_prompt_tokens == recipe.data.max_prompt_tokens and not config.data.chat_template_args
    assert (config.rollout, config.algorithm, config.reward) == (recipe.rollout, recipe.algorithm, recipe.reward)
    recipes.write_questions(config, tokens=30, steps=2)
    rows = [json.loads(line) for line in Path(config.data.source).read_text().splitlines()]
    assert len(rows) == 64 * 4 + 8 and {len(tiny.build_tokenizer().encode(row["question"])) for row in rows} == {30}


def test_a_recipe_whose_shape_is_not_known_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"Qwen/Qwen3-1\.7: its shape is not known here; nearest: Qwen/Qwen3-1\.7B"):
        recipes.as_here("experiments/configs/dapo.yaml", {"model.path": "Qwen/Qwen3-1.7"}, tmp_path / "q.jsonl")


def test_verl_is_given_ppo() -> None:
    config = from_tree(with_overrides({}, workload.GPU | workload.gpu_shares(1) | against_verl.PPO))
    alike.check(config, "veRL", has_ppo=True)
    with pytest.raises(ConfigError, match=r"algorithm\.advantage gae: TRL does the same work only with grpo"):
        alike.check(config, "TRL")
    given = verl_settings.overrides(config)
    assert given["algorithm.adv_estimator"] == "gae" and given["algorithm.kl_ctrl.kl_coef"] == 0.05
    assert given["actor_rollout_ref.actor.ppo_epochs"] == 2 and given["critic.ppo_max_token_len_per_gpu"] == 16_384
    assert given["critic.optim.lr"] == config.train.critic_lr


def test_critics_of_verl_are_computed_as_its_policies_but_for_their_heads() -> None:
    config = from_tree(with_overrides({}, workload.GPU))
    given = verl_settings.models(config, "packed, liger")
    assert given["+critic.model.override_config.attn_implementation"] == "verl_varlen"
    assert given["actor_rollout_ref.model.fused_kernel_options.impl_backend"] == "triton"
    assert given["critic.model.use_liger"] and "critic.model.fused_kernel_options.impl_backend" not in given


def test_verls_tokenizer_has_a_token_for_each_output_of_the_model(tmp_path: Path) -> None:
    """veRL's engine draws only tokens that the tokenizer has; its trainer scores them among all outputs."""
    shape = LlamaConfig(vocab_size=5000, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    tiny.build_tokenizer().save_pretrained(tmp_path / "model")
    shape.save_pretrained(tmp_path / "model")
    known = AutoTokenizer.from_pretrained(tmp_path / "model")
    folder = against_verl.model_folder(tmp_path / "verl", str(tmp_path / "model"), known)
    given = AutoTokenizer.from_pretrained(folder)
    assert len(known) < 200 and len(given) == 5000
    assert known.get_vocab().items() <= given.get_vocab().items()
    assert given.encode("What is 12 + 3?") == known.encode("What is 12 + 3?")
    assert given.eos_token_id == known.eos_token_id  # which ends its responses


def test_rlx_is_compared_with_verls_fastest_way() -> None:
    slow, fast = ([{"tokens/s": rate, "response_length/mean": 256.0, "timing_s/gen": 2.0}] for rate in (50.0, 100.0))
    before, after = {alike.RLX: 210.0}, {alike.RLX: 190.0}
    figures = against_verl.compared(before, after, {"padded": slow, "packed": fast})
    assert figures["rlx / veRL, packed"] == 2.0 and figures["veRL, gen, s"] == 2.0


def test_verls_steps_are_read_from_what_it_prints() -> None:
    line = (
        "(TaskRunner pid=7) step:3 - response_length/mean:np.float64(256.0) - timing_s/gen:2.5 - timing_s/step:8.0e+00"
    )
    found = against_verl.metrics(line, completions=512)
    assert found["tokens/s"] == 512 * 256 / 8 and found["timing_s/gen"] == 2.5
    assert against_verl.metrics("(TaskRunner pid=7) Training Progress: 3/5 step:3, version:0.9.1", 512) == {}


def test_verls_steps_are_counted_and_nothing_of_it_is_left(
    tmp_path: Path, small_tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for veRL's command, with a process of its own: it prints three steps, or two and that its engine has
    died, and never ends."""
    monkeypatch.setattr(against_verl, "_PATIENCE_S", 0.5)
    package = tmp_path / "verl" / "trainer"
    package.mkdir(parents=True)
    command = """
import os, pathlib, subprocess, sys, time
child = subprocess.Popen(["sleep", "600"]).pid
pathlib.Path(os.environ["PYTHONPATH"].split(":")[0], "pids").write_text(f"{os.getpid()} {child}")
steps = int(next(word for word in sys.argv if word.startswith("trainer.total_training_steps=")).split("=")[1])
for step in range(steps if steps == 3 else 2):
    print(f"step:{step} - response_length/mean:4.0 - timing_s/step:{step + 1}.0", flush=True)
if steps != 3:
    print("EngineDeadError\\nand why\\nEngineDeadError", flush=True)
time.sleep(600)
"""
    for file in (package.parent / "__init__.py", package / "__init__.py"):
        file.touch()  # else a veRL that is installed here would be taken
    (package / "main_ppo.py").write_text(command)
    prompts = [[(5, 6, 7)]] * 4
    config = from_tree(with_overrides({}, workload.GPU | {"train.prompts_per_step": 2, "train.samples_per_prompt": 4}))

    def steps(count: int) -> list[dict[str, float]]:
        run = config.model_copy(update={"train": config.train.model_copy(update={"steps": count})})
        return against_verl.by_verl(run, small_tokenizer, prompts, str(tmp_path), tmp_path / "out", "packed, liger")

    def is_left() -> bool:
        """Killed processes take a moment to end."""
        deadline = time.monotonic() + 10
        for pid in map(int, (tmp_path / "pids").read_text().split()):
            with suppress(psutil.NoSuchProcess):
                while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                    if time.monotonic() > deadline:
                        return True
                    time.sleep(0.05)
        return False

    assert [step["tokens/s"] for step in steps(3)] == [8 * 4 / 3]
    assert not is_left()
    with pytest.raises(RuntimeError, match=r"veRL, packed, liger, ended after 2 of 4 steps; .*verl-packed-liger\.log"):
        steps(4)
    assert not is_left()
    assert "EngineDeadError\nand why" in (tmp_path / "out" / "verl-packed-liger.log").read_text()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_the_gpu_defaults_need_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert update.main(["--gpu"]) == 1
    assert capsys.readouterr().err == "error: scaling.use_gpu: torch sees no GPU on this machine\n"


@pytest.mark.parametrize(("gpus", "placement"), [(1, "separate"), (2, "separate"), (1, "colocated")])
def test_the_gpu_defaults_are_a_config(gpus: int, placement: str) -> None:
    defaults = workload.GPU | workload.gpu_shares(gpus, placement == "colocated")
    config = from_tree(with_overrides({}, defaults | {"rollout.placement": placement}))
    needed = plan_resources(config)
    whole = gpus > 1 or placement == "colocated"  # a colocated engine uses its worker's
    assert needed.total()["GPU"] == gpus and needed.engines[0]["GPU"] == (1 if whole else 0.5)
    assert config.model.dtype == "bfloat16" and config.resolved_critic == config.resolved_reference == "none"


@pytest.mark.parametrize(
    ("name", "value", "on_gpu", "verdict"),
    [
        ("rollout / bare vLLM", 0.90, False, "met"),
        ("rollout / bare vLLM", 0.90, True, "missed"),
        ("update memory / bare loop memory", 1.2, True, "missed"),
        ("step with k = 1 / step with k = 0", 0.69, True, "met"),
        ("bare loop FLOPs utilisation", 0.1, False, ""),  # no target on a CPU
        ("update tokens/s", 5000.0, True, ""),
    ],
)
def test_a_line_says_whether_the_target_is_met(name: str, value: float, on_gpu: bool, verdict: str) -> None:
    line = table.line(name, value, on_gpu)
    assert line.startswith(name)
    assert line.split()[-1] == verdict if verdict else not line.endswith(("met", "missed"))


def test_the_figures_are_written_with_the_machine_and_the_settings(
    small_model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = settings(model__path=small_model)
    figures = {"update / bare loop": 0.5, "bare loop FLOPs utilisation": 0.1}
    table.finish("update", figures, config, str(tmp_path / "new"), 0.25, {"precision": "float32"})
    assert "missed" in capsys.readouterr().out
    written = json.loads((tmp_path / "new" / "update-cpu.json").read_text())
    assert written["figures"] == figures
    assert written["targets"] == {"update / bare loop": ">=0.85"}  # none for the other on a CPU
    assert "torch" in written["machine"]["versions"] and written["machine"]["load before"] == 0.25
    assert "hidden_size 16" in written["measured"]["model"] and written["settings"]["train.ppo_epochs"] == 1


def test_micro_batches_hold_every_token_once_within_the_budget() -> None:
    micros = bare.micro_batches(SEQUENCES, 10, torch.device("cpu"))
    assert [tuple(micro.ids.shape) for micro in micros] == [(2, 4), (1, 5), (1, 7)]
    scored = sorted(token for micro in micros for token in micro.targets.tolist())
    assert scored == sorted(token for prompt, tokens in SEQUENCES for token in tokens[prompt:])


def test_the_bare_loop_takes_the_optimizer_step_of_the_whole_mini_batch(
    small_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bare, "_CHUNK", 3)
    config = settings(train__micro_batch_tokens=10, train__num_minibatches=1, train__actor_lr=1e-2)
    loop = bare.Loop(config, small_model)
    assert loop.load(SEQUENCES) == 18
    assert loop.round() > 0

    plain = AutoModelForCausalLM.from_pretrained(small_model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, betas=config.train.adam_betas, weight_decay=0.0)
    logprobs = []
    for prompt, tokens in SEQUENCES:
        scores = plain(input_ids=torch.tensor([tokens])).logits[0].log_softmax(-1)
        logprobs += [scores[i - 1, tokens[i]] for i in range(prompt, len(tokens))]
    (-torch.stack(logprobs).mean()).backward()
    torch.nn.utils.clip_grad_norm_(plain.parameters(), config.train.max_grad_norm)
    optimizer.step()
    for (name, own), expected in zip(loop.policy.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-3, atol=1e-4, msg=name)


def test_the_bare_loop_keeps_small_steps_in_bfloat16(small_model: str) -> None:
    loop = bare.Loop(settings(model__dtype="bfloat16", train__actor_lr=1e-6, train__num_minibatches=1), small_model)
    (learner,) = loop.learners
    before = [weight.detach().clone() for weight in learner.weights]
    loop.load(SEQUENCES)
    for _ in range(20):
        loop.round()
    for held, weight, start in zip(loop.policy.parameters(), learner.weights, before, strict=True):
        assert torch.equal(held, weight.bfloat16())
        assert 1e-6 < (weight - start).abs().max() < 1e-4  # less than bfloat16 can tell apart at most weights' size


def test_flops_are_counted_by_hand(small_model: str) -> None:
    loop = bare.Loop(settings(), small_model)
    loop.load(SEQUENCES)
    layer = 16 * 16 * 2 + 16 * 8 * 2 + 3 * 16 * 24 + 2 * 16  # q and o, k and v, the MLP, two norms
    body, head = 2 * layer + 16, 40 * 16
    attention = 6 * 2 * 4 * 4 * (4**2 + 7**2 + 2**2 + 5**2)
    assert loop.flops() == 6 * (body * 18 + head * 8) + attention


def test_a_critic_is_trained_too(small_model: str) -> None:
    one = bare.Loop(settings(), small_model)
    two = bare.Loop(settings(algorithm__advantage="gae"), small_model)
    for loop in (one, two):
        loop.load(SEQUENCES)
        assert loop.round() > 0
    assert two.flops() > one.flops()


def test_a_step_ahead_is_compared_with_the_parts_of_one_that_is_not() -> None:
    now = {"time/rollout": 2.8, "time/reward": 0.1, "time/logprobs": 0.6, "time/update": 2.0, "time/sync": 0.5}
    now |= {"time/step": 6.0, "time/generation": 3.0}  # for 0.2 s the trainer scored a chunk meanwhile
    figures = step.compared([now], [{"time/step": 3.3}])
    assert figures["step with k = 1 / max(rollout, update)"] == pytest.approx(1.1)
    assert figures["step with k = 1 / step with k = 0"] == pytest.approx(0.55)
    assert figures["the least that could be"] == pytest.approx(3.2 / 6.0)
    parts = step.parts([now])
    assert parts["rollout / step"] == pytest.approx(2.8 / 6.0) and parts["engines draw, s"] == 3.0


@pytest.mark.parametrize("gpus", [1, 2, 4])
def test_a_large_model_is_placed_on_all_gpus_in_turns(gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workload, "gpus", lambda: gpus)
    defaults = large_model.GPU | large_model.placed(in_turns=True)
    _, config = workload.read(workload.parser("", steps=(1, 1)), ["--gpu"], gpu=defaults)
    assert plan_resources(config).total()["GPU"] == gpus


def test_scaling_gives_updates_a_whole_gpu_and_whole_steps_the_placement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workload, "gpus", lambda: 4)
    _, turns = workload.read(
        workload.parser("", steps=(1, 1)), ["--gpu", "--rollout.placement", "colocated"], gpu=workload.GPU
    )
    alone = scaling.scaled(turns, 4, scaling.without_engines(turns))
    assert alone.rollout.placement == "separate" and alone.scaling.resources_per_worker["GPU"] == 1
    assert scaling.fits(scaling.scaled(turns, 4, {"rollout.num_engines": 4}))
    _, apart = workload.read(workload.parser("", steps=(1, 1)), ["--gpu"])
    assert not scaling.fits(scaling.scaled(apart, 4, {"rollout.num_engines": 4}))


def test_ranks_are_what_the_machine_has() -> None:
    assert scaling.ranks("--ranks", None, None) == [1, 2]
    assert scaling.ranks("--ranks", None, 4) == [1, 2, 4]
    assert scaling.ranks("--ranks", "1,3", None) == [1, 3]
    for words, gpus in (("1,4", 2), ("0,1", None), ("1,1", None), ("one", None), ("1,", None)):
        with pytest.raises(ConfigError, match="--ranks"):
            scaling.ranks("--ranks", words, gpus)


def test_scaling_is_a_share_of_the_next_smaller_number() -> None:
    figures = scaling.per_rank("update", {1: 100.0, 2: 95.0, 4: 76.0})
    assert figures["update tokens/s per rank, 2 / 1 ranks"] == 0.95
    assert figures["update tokens/s per rank, 4 / 2 ranks"] == 0.8
    assert set(figures) & set(table.TARGETS) == {
        f"update tokens/s per rank, {pair} ranks" for pair in ("2 / 1", "4 / 2")
    }


def test_each_rank_has_as_much_work() -> None:
    config = scaling.scaled(settings(), 2, {})
    assert config.scaling.num_workers == 2 and config.train.prompts_per_step == 2 * settings().train.prompts_per_step
