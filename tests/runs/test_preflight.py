"""What is found wrong with a run before any of it starts: models, prompt files, rewards, servers, the disk."""

import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from pyarrow import fs

from rlx.cluster import machine
from rlx.config.errors import ConfigError
from rlx.config.loading import from_tree, with_overrides
from rlx.config.sections.reward import RewardConfig
from rlx.models import loading, tiny
from rlx.models.folder import checkpoint_bytes
from rlx.rewards import scoring
from rlx.rewards.custom import RewardError
from rlx.runs import preflight, run_folder
from rlx.storage.filesystem import Storage, StorageError
from rlx.types import Prompt


def test_a_model_must_be_divisible_by_the_gpus_that_it_is_split_over(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"num_attention_heads": 14}')
    split = {"rollout.tensor_parallel": 4, "rollout.resources_per_engine.GPU": 4}
    with pytest.raises(ConfigError, match=r"rollout.tensor_parallel 4 does not divide the 14 attention heads"):
        preflight.check_model(from_tree(with_overrides({}, split)), str(tmp_path))


def test_targets_of_adapters_are_looked_for_before_anything_starts(tiny_model: Path) -> None:
    def check(*targets: str) -> None:
        given = {"model.path": str(tiny_model), "model.lora_rank": 2, "model.lora_targets": targets}
        preflight.check_model(from_tree(with_overrides({}, given | {"data.max_prompt_tokens": 16})), str(tiny_model))

    check("q_proj", "mlp.up_proj")
    with pytest.raises(ConfigError, match=r"^model\.lora_targets v_prj: no linear layer .*; nearest: v_proj$"):
        check("q_proj", "v_prj")
    with pytest.raises(ConfigError, match=r"^model\.lora_targets lm_head: the output layer is tied to the embedding: "):
        check("q_proj", "lm_head")
    with pytest.raises(ConfigError, match=r"model\.lora_targets\.1 = '': expected a value, found an empty one"):
        check("q_proj", "")


def test_adapters_have_no_higher_rank_than_the_layers(tiny_model: Path) -> None:
    """Workers would ask for their memory again and again."""
    width = json.loads((tiny_model / "config.json").read_text())["hidden_size"]

    def check(rank: int) -> None:
        given = {"model.path": str(tiny_model), "model.lora_rank": rank, "data.max_prompt_tokens": 16}
        preflight.check_model(from_tree(with_overrides({}, given)), str(tiny_model))

    check(width)
    with pytest.raises(
        ConfigError, match=rf"^model\.lora_rank {width + 1}: no layer of .* than {width}, its hidden_size"
    ):
        check(width + 1)


def test_layers_of_adapters_are_looked_at_once(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked, check = list[str](), loading.check_adapted_layers
    monkeypatch.setattr(loading, "check_adapted_layers", lambda path, model: (looked.append(path), check(path, model)))
    model = {"path": str(tiny_model), "lora_rank": 2, "lora_targets": ["q_proj"]}
    of_critic = {"critic": "separate", "critic_path": str(tiny_model)}
    tree = {"storage": str(tmp_path), "model": model | of_critic, "data": {"max_prompt_tokens": 16}}
    preflight.prepare(from_tree(tree), tables={"train": None})
    assert looked == [str(tiny_model)]


@pytest.mark.parametrize("setting", ["data.source", "data.ptx_source", "eval.source"])
def test_a_missing_prompt_file_is_refused_before_a_model_is_created(setting: str, tmp_path: Path) -> None:
    (tmp_path / "there.jsonl").write_text('{"question": "1 + 1?", "answer": "2"}')
    given = {"storage": str(tmp_path / "storage"), "data.source": str(tmp_path / "there.jsonl"), "data.params": {}}
    given |= {setting: str(tmp_path / "p.jsonl")} | ({"algorithm.ptx_coef": 0.1} if "ptx" in setting else {})
    with pytest.raises(ConfigError, match=rf"^{setting} .*p\.jsonl: no such file$"):
        preflight.prepare(from_tree(with_overrides({}, given)))
    assert not (tmp_path / "storage").exists()


@pytest.mark.parametrize(
    ("given", "error"),
    [
        (
            {"params": {"max_digit": 3}},
            "data.sources.1.params.max_digit: chain_sum has no such parameter; nearest: max_",
        ),
        ({"params": {"min_terms": 5, "max_terms": 2}}, "data.sources.1.params {'min_terms': 5, 'max_terms': 2}: chain"),
        ({"source": "reasoning_gym:chain_sums"}, "data.sources.1.source: reasoning-gym has no dataset 'chain_sums'; n"),
        ({"source": "nosuch.jsonl"}, "data.sources.1.source nosuch.jsonl: no such file"),
        (
            {"source": "there.jsonl", "held_out": "nofile.jsonl"},
            "data.sources.1.held_out nofile.jsonl: no such file",
        ),
        (
            {"source": "there.jsonl", "held_out": "reasoning_gym:chain_sum"},
            "data.sources.1.held_out reasoning_gym:chain_sum: expected a prompt file; only",
        ),
        ({"source": "one.jsonl"}, "data.sources.1.source: 1 rows are too few to hold one out; set data.sources.1.held"),
    ],
)
def test_an_error_of_one_of_several_sources_names_it(
    given: dict[str, Any], error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, count in (("there", 9), ("one", 1)):
        (tmp_path / f"{name}.jsonl").write_text('{"question": "1 + 1?", "answer": "2"}\n' * count)
    second = {"source": "reasoning_gym:chain_sum", "name": "second"} | given
    first = "there.jsonl" if given.get("source") == "one.jsonl" else "reasoning_gym:spell_backward"
    sources = [{"source": first}, second]
    tree = {"storage": str(tmp_path / "storage"), "data": {"sources": sources}}
    with pytest.raises(ConfigError) as refused:
        preflight.prepare(from_tree(tree))
    assert str(refused.value).replace(f"{Path.cwd()}/", "").startswith(error)  # addresses are absolute by then


def test_params_of_all_sources_are_checked_for_each(tmp_path: Path) -> None:
    data = {"sources": [{"source": "reasoning_gym:spell_backward"}], "params": {"max_terms": 3}}
    with pytest.raises(ConfigError, match=r"^data\.sources\.0\.params\.max_terms: spell_backward has no such"):
        preflight.prepare(from_tree({"storage": str(tmp_path / "storage"), "data": data}))


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"max_digit": 3}, r"^eval\.sets sums: params\.max_digit: chain_sum has no such parameter; nearest: "),
        ({"min_terms": 5, "max_terms": 2}, r"^eval\.sets sums: params \{.*\}: chain_sum refuses them: max_terms must"),
    ],
)
def test_an_error_of_the_parameters_of_a_held_out_set_names_it(
    given: dict[str, Any], error: str, tmp_path: Path
) -> None:
    sums = {"name": "sums", "source": "reasoning_gym:chain_sum", "num_prompts": 4, "params": given}
    with pytest.raises(ConfigError, match=error):
        preflight.prepare(from_tree({"storage": str(tmp_path / "storage"), "eval": {"sets": [sums]}}))


@pytest.mark.parametrize(
    ("rows", "given", "error"),
    [
        (
            13,
            {"train.prompts_per_step": 16},
            r"^train\.prompts_per_step \(16\) is more than the 12 prompts to train on$",
        ),
        (21, {"train.prompts_per_step": 20}, r"\(20\) is more than the 19 prompts"),  # a tenth is held out
        (1, {"train.prompts_per_step": 4}, r"1 rows are too few to hold one out; set eval\.source"),
        (9, {"train.prompts_per_step": 12, "eval.source": "p.jsonl"}, r"\(12\) is more than the 9 prompts"),
    ],
)
def test_too_few_rows_are_refused_without_ray(rows: int, given: dict[str, Any], error: str, tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text("".join(f'{{"question": "1 + {n}?", "answer": "{n + 1}"}}\n' for n in range(rows)))
    given |= {"eval.source": str(file)} if "eval.source" in given else {}
    stored = {"storage": str(tmp_path / "storage"), "data.source": str(file), "data.params": {}}
    with pytest.raises(ConfigError, match=error):
        preflight.prepare(from_tree(with_overrides({}, given | stored)))
    assert not (tmp_path / "storage").exists()


def test_malformed_unit_tests_in_any_row_are_refused_without_ray(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    tests = ["assert add(1, 2 == 3" if number == 41 else "assert add(1, 2) == 3" for number in range(1, 61)]
    rows = [json.dumps({"question": f"Add {number}.", "answer": each}) for number, each in enumerate(tests)]
    file.write_text("\n".join(rows))
    coded = {"source": str(file), "params": {}}
    with pytest.raises(ConfigError) as refused:
        preflight.prepare(from_tree({"storage": str(tmp_path / "s"), "data": coded, "reward": CODE}))
    problem = "reward code: the answer holds no tests: '(' was never closed (tests, line 1)"
    assert str(refused.value) == f"data.source {file}:41: {problem}"
    with pytest.raises(ConfigError, match=rf"^data\.source {file}:41: environment code: the answer holds no tests: "):
        preflight.prepare(from_tree({"storage": str(tmp_path / "s"), "data": coded, "environment": {"name": "code"}}))
    # Of several sources, those that `code` scores.
    tree = {"data": {"sources": [coded | {"reward": CODE["functions"]}, {"source": "reasoning_gym:chain_sum"}]}}
    with pytest.raises(ConfigError, match=rf"^data\.sources\.0\.source {file}:41: reward code: "):
        preflight.prepare(from_tree(tree | {"storage": str(tmp_path / "s"), "reward": BOTH}))
    assert not (tmp_path / "s").exists()


def test_a_trial_on_another_machine_needs_no_prompt_file(tiny_model: Path, tmp_path: Path) -> None:
    given = {"storage": str(tmp_path), "data.source": str(tmp_path / "p.jsonl"), "data.params": {}}
    config = from_tree(with_overrides({}, given | {"model.path": str(tiny_model)}))
    assert preflight.prepare(config, tables={"train": None}).model_path == str(tiny_model)


def test_an_argument_that_the_chat_template_lacks_is_refused_before_anything_starts(
    tiny_model: Path, tmp_path: Path
) -> None:
    given = {"storage": str(tmp_path), "model.path": str(tiny_model), "data.chat_template_args": {"messag": 1}}
    config = from_tree(with_overrides({}, given))
    said = r"^data\.chat_template_args: messag is not a variable of the chat template of .*, which has none$"
    with pytest.raises(ConfigError, match=said):
        preflight.prepare(config)
    preflight.prepare(config, tables={"train": None})  # of a trial: its prompts have been made


CODE: dict[str, Any] = {"functions": {"code": 1}, "sandbox": "limits"}
BOTH = CODE | {"functions": {"task": 1, "code": 1}}
LAMBDA = {"algorithm.gae_lambda": 0.9}


def test_a_conversation_for_a_model_without_a_chat_template_is_refused_without_ray(
    tiny_model: Path, tmp_path: Path
) -> None:
    base = shutil.copytree(tiny_model, tmp_path / "base")
    (base / "chat_template.jinja").unlink()
    said = [{"role": role, "content": f"{n} + 1?"} for n, role in enumerate(["user", "assistant", "user"])]
    file = tmp_path / "chats.jsonl"
    file.write_text("".join(json.dumps({"question": said[2 * (n < 9) :], "answer": "3"}) + "\n" for n in range(99)))
    tree = {"storage": str(tmp_path / "storage"), "data": {"source": str(file), "params": {}}}
    preflight.prepare(from_tree(tree | {"model": {"path": str(base)}}))  # the first rows are single messages
    file.write_text(f"{json.dumps({'question': said, 'answer': '3'})}\n" * 99)
    preflight.prepare(from_tree(tree | {"model": {"path": str(tiny_model)}}))
    needed = rf"^model\.path {base}: its tokenizer: there is no chat template, which a conversation of 3 messages needs"
    with pytest.raises(ConfigError, match=needed):
        preflight.prepare(from_tree(tree | {"model": {"path": str(base)}}))


def test_lengths_are_settled_by_the_model_before_anything_starts(tiny_model: Path, tmp_path: Path) -> None:
    """The tiny model has 512 positions. What is settled is saved with the run, and is then as given."""
    given = {"storage": str(tmp_path), "model.path": str(tiny_model)}
    ready = preflight.prepare(from_tree(with_overrides({}, given))).config
    assert (ready.data.max_prompt_tokens, ready.rollout.max_tokens) == (256, 256)
    ready = preflight.prepare(from_tree(with_overrides({}, given | {"data.max_prompt_tokens": 100}))).config
    assert (ready.data.max_prompt_tokens, ready.rollout.max_tokens) == (100, 412)
    saved = from_tree(ready.model_dump(mode="json"))
    assert preflight.prepare(saved).config == ready
    for lengths, sum_of_both in (({"rollout.max_tokens": 512}, 513), ({"data.max_prompt_tokens": 600}, 601)):
        with pytest.raises(ConfigError, match=rf"= {sum_of_both}, but .* has 512 positions$"):
            preflight.prepare(from_tree(with_overrides({}, given | lengths)))


def test_the_context_of_a_model_of_the_hub_is_read_from_its_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = from_tree({"model": {"path": "org/name"}})
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert preflight.lengths(config.data, config.rollout, "org/name")["rollout.max_tokens"] == 1024  # nobody knows
    snapshot = tmp_path / "models--org--name" / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text('{"n_positions": 700}')  # as GPT-2 has it
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("1")
    assert preflight.lengths(config.data, config.rollout, "org/name") == {
        "data.max_prompt_tokens": 350, "rollout.max_tokens": 350,
    }  # fmt: skip
    assert preflight.lengths(config.data, config.rollout, "tiny") == {}  # its folder may not exist yet


@pytest.mark.parametrize(
    ("more", "shown"),
    [(LAMBDA, True), ({}, False), (LAMBDA | {"checkpoint.init_from": "/runs/a/step_000005"}, False)],
)
def test_what_is_known_to_fail_is_shown_once(
    more: dict[str, Any], shown: bool, tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A critic that comes from a checkpoint has learnt."""
    given = {"storage": str(tmp_path), "model.path": str(tiny_model)}
    preflight.prepare(from_tree(with_overrides({}, given | more)))
    assert caplog.text.count("warning: algorithm.gae_lambda 0.9 with rollout.max_tokens 256: ") == shown


@pytest.mark.slow
def test_rewards_are_tried_before_a_start_and_only_warn_where_workers_have_gpus(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    code = "def f(prompts, completions, answers): return [1.0, int(completions[1])]\n"
    (tmp_path / "tried_rewards.py").write_text(code)
    rewards = RewardConfig(functions={"tried_rewards:f": 1.0})
    prompts = [Prompt(0, (), "1 + 1?", "2"), Prompt(1, (), "Who?", "Ann")]
    with (
        pytest.raises(RewardError, match=r"ValueError.*'Ann'.* at .*tried_rewards\.py:1.*; in full in ") as failed,
        run_folder.keeping_details(Storage.local(tmp_path)),
    ):
        scoring.try_rewards(rewards, prompts, on_gpu=False)
    (details,) = tmp_path.glob("reward_error_*.txt")
    assert str(details) in str(failed.value) and "Traceback" in details.read_text() and '"Ann"' in details.read_text()
    scoring.try_rewards(rewards, prompts, on_gpu=True)
    assert "need not be like those of the workers: reward " in caplog.text


_NO_WEIGHTS = ("model__gguf", "training_args__bin", "optimizer__pt", "scheduler__pth")


def model_folder(folder: Path, **files: bytes) -> str:
    """A model's folder with these files beside its config; a__b names a.b."""
    for name, content in {"config__json": b"{}", **files}.items():
        (folder / name.replace("__", ".")).write_bytes(content)
    return str(folder)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"model__safetensors": b""}, r"it has no tokenizer \(tokenizer.json\): "),
        ({"tokenizer__json": b"{}"}, r"it has no weights \(model.safetensors\): "),
        *[({"tokenizer__json": b"{}", name: b""}, "it has no weights") for name in _NO_WEIGHTS],
        ({"tokenizer__json": b"version https://git-lfs", "model__safetensors": b""}, "damaged, or not downloaded"),
    ],
)
def test_a_model_that_lacks_a_file_is_refused(files: dict[str, bytes], message: str, tmp_path: Path) -> None:
    path = model_folder(tmp_path, **files)
    with pytest.raises(ConfigError, match=rf"^model\.path {path}.*{message}"):
        preflight.check_model(from_tree({}), path)


def test_a_critic_of_other_tokens_or_of_a_short_context_is_refused(tmp_path: Path) -> None:
    def folder(name: str, vocabulary: dict[str, int], positions: int) -> str:
        (tmp_path / name).mkdir()
        tokenizer = json.dumps({"model": {"vocab": vocabulary}, "added_tokens": [{"id": 2, "content": "<end>"}]})
        config = json.dumps({"max_position_embeddings": positions})
        files = {"config__json": config.encode(), "tokenizer__json": tokenizer.encode(), "model__safetensors": b""}
        return model_folder(tmp_path / name, **files)

    path, same = folder("policy", {"a": 0, "b": 1}, 4096), folder("same", {"a": 0, "b": 1}, 4096)
    other, short = folder("other", {"b": 0, "a": 1}, 4096), folder("short", {"a": 0, "b": 1}, 8)
    for key in ("critic_path", "reference_path"):
        preflight.check_model(from_tree({"model": {key: same}}), path)
        with pytest.raises(ConfigError, match=rf"^model.{key} {other}: its tokenizer is another one than that of"):
            preflight.check_model(from_tree({"model": {key: other}}), path)
        with pytest.raises(ConfigError, match=rf"but model.{key} {short} has 8 positions"):
            preflight.check_model(from_tree({"model": {key: short}}), path)
        with pytest.raises(ConfigError, match=rf"^model.{key} ./nosuch: no such folder"):
            preflight.check_quickly(from_tree({"model": {key: "./nosuch"}}), has_prompts=True)


@pytest.mark.parametrize("key", ["critic_path", "reference_path"])
def test_a_critic_or_a_reference_may_be_a_model_that_rlx_makes(
    key: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def folder_only(path: Path, progress: object, recipe: object) -> None:
        shutil.copytree(tiny_model, path)

    monkeypatch.setattr(tiny, "make_tiny_model", folder_only)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()  # which is no model
    prepared = preflight.prepare(from_tree({"model": {"path": str(tiny_model), key: "tiny"}}))
    path = Path(getattr(prepared.config.model, key))
    assert path.parent == tmp_path / "storage" / "models" and (path / "config.json").is_file()
    assert prepared.model_path == str(tiny_model)
    assert preflight.prepare(from_tree(prepared.config.model_dump())).config == prepared.config  # of a resumed run


def test_a_model_whose_checkpoint_fills_the_disk_is_refused_and_its_adapters_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    header = json.dumps({"w": {"dtype": "F32", "shape": [10**6, 10**6], "data_offsets": [0, 4]}}).encode()
    weights = struct.pack("<Q", len(header)) + header
    path = model_folder(tmp_path, tokenizer__json=b"{}", model__safetensors=weights)
    storage = str(tmp_path / "new" / "storage")

    def check(**settings: Any) -> None:
        config = from_tree(settings)
        needed = checkpoint_bytes(path, config.model, config.train, config.resolved_critic)
        preflight.check_disk(needed, storage, config.ray_address)

    with pytest.raises(StorageError, match=r"MiB are free on its disk, and a checkpoint of this model takes about 22,"):
        check()
    with pytest.raises(StorageError, match=r" takes about 26,.* or give another --storage$"):
        check(train={"ema_decay": 0.9})
    check(model={"lora_rank": 8})
    with pytest.raises(StorageError, match=r" takes about 11,"):
        check(model={"lora_rank": 8, "critic": "separate"})
    remote = Storage(fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem()), "x")
    monkeypatch.setattr(preflight, "open_storage", lambda *_, **__: remote)
    with pytest.raises(StorageError, match=r"^storage .*before it is sent, takes about .*TMPDIR to another folder$"):
        check()
    check(ray_address="10.0.0.1:6379")  # nobody knows where the workers are


@pytest.mark.parametrize(
    ("reward", "setting"),
    [
        ({"functions": {"url": 1.0}, "url": "http://127.0.0.1:9/score"}, "reward.url http://127.0.0.1:9/score"),
        (
            {"functions": {"judge": 1.0}, "judge_url": "http://127.0.0.1:9/v1", "judge_model": "m"},
            "reward.judge_url http://127.0.0.1:9/v1/chat/completions",
        ),
    ],
)
def test_a_reward_server_that_is_down_is_refused_before_anything_starts(
    reward: dict[str, Any], setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "_has_joined", lambda: False)  # other tests of this process may have
    with pytest.raises(ConfigError, match=rf"^{re.escape(setting)}: no server answers there \(.*refused"):
        preflight.check_quickly(from_tree({"reward": reward}))
    preflight.check_quickly(from_tree({"reward": reward}), has_prompts=True)  # of a trial: it has its retries
    with pytest.raises(ConfigError, match=r"^ray_address 127"):  # whose nodes may reach the server
        preflight.check_quickly(from_tree({"reward": reward, "ray_address": "127.0.0.1:9"}))


def test_the_quick_checks_import_nothing_slow() -> None:
    """Each of them takes seconds to import: `rlx train` would refuse nothing within two."""
    code = (
        "import sys\nfrom rlx.cli.train import main\nfrom rlx.sweeps import choices\n"
        "code = main(['--data.source', 'nosuch.csv', '--data.params', '{}', '--storage', sys.argv[1]])\n"
        "slow = {'ray', 'torch', 'mlflow', 'transformers', 'pandas', 'reasoning_gym', 'datasets'} & set(sys.modules)\n"
        "sys.exit(f'{code} {slow}' if code != 1 or slow else 0)"
    )
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stderr == (
        f"error: data.source nosuch.csv: no such file; relative paths begin in the working folder, {os.getcwd()}\n"
    )
