"""A checkpoint's policy as a Hugging Face folder: the trainer's weights to the last bit, and the same log-probabilities
from transformers, peft and vLLM."""

import json
import runpy
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import ray
import s3
import torch
import yaml
from peft import AutoPeftModelForCausalLM
from pyarrow import fs
from run_cases import small
from safetensors import SafetensorError
from shared import OnRanks, start_engine, stop_engine
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlx import __version__
from rlx.config.loading import from_tree
from rlx.config.run import RunConfig
from rlx.mesh import Mesh
from rlx.models import fsdp, lora
from rlx.models.policy import ResponseTokens
from rlx.rollout.engine_pool import EnginePool
from rlx.rollout.weight_sync import gather
from rlx.runs import export
from rlx.storage import checkpoint_catalog, checkpoint_files
from rlx.storage.addresses import open_storage
from rlx.storage.checkpoint_catalog import CheckpointEntry
from rlx.storage.checkpoint_manifest import Manifest
from rlx.storage.filesystem import Storage
from rlx.training import trainer
from rlx.training.setup.models import build_models
from rlx.types import Prompt, Sampling, ShardedWeight

ROOT = Path(__file__).resolve().parents[2]
ROWS = torch.randint(6, 90, (5, 20), generator=torch.Generator().manual_seed(4))
PROMPT = 12  # tokens of each row; the others are its response
LORA = {"model__lora_rank": 4, "model__lora_alpha": 8.0}
KINDS: dict[str, dict[str, Any]] = {
    "tied": {"scaling__num_workers": 1},
    "untied": {"train__ema_decay": 0.5},
    "cut": {"train__ema_decay": 0.5, "parallel__tp": 2},
    "merged": LORA | {"train__ema_decay": 0.5},
    "some": LORA | {"model__lora_targets": ("q_proj", "down_proj"), "scaling__num_workers": 1},
    "bfloat16": {"scaling__num_workers": 1, "model__dtype": "bfloat16"},
}


@dataclass(frozen=True)
class Made:
    """A run with one checkpoint, and what the trainer had when it was written."""

    config: RunConfig
    storage: Path
    weights: dict[str, dict[str, Tensor]]  # policy and average, as engines are sent them
    logprobs: dict[str, Tensor]  # [5, 8] of ROWS' responses, likewise
    adapters: dict[str, Tensor]

    @property
    def folder(self) -> Path:
        return self.storage / "runs" / str(self.config.name)

    @property
    def entry(self) -> CheckpointEntry:
        return checkpoint_catalog.read_checkpoint(Storage.local(self.folder / "step_000003"))


def trained(rank: int, ranks: int, tree: dict[str, Any], path: str, folder: str) -> dict[str, Any]:
    """One optimizer step by the trainer's own models, and this rank's file of a checkpoint."""
    config = from_tree(tree)
    models = build_models(config, path, Mesh.of("cpu", config.parallel.tp).mesh).trained
    policy: Any = models["policy"].model
    average = trainer.initial_ema(config.train, policy)
    for part in models.values():
        for i, weight in enumerate(p for p in part.model.parameters() if p.requires_grad):
            weight.grad = weight.detach() * 0.1 + 0.01 * (-1) ** i  # adapters' B is 0, and must not stay so
        part.optimizer.step()
    for name, weight in policy.named_parameters():
        if name in average:
            average[name].mul_(0.5).add_(weight.detach(), alpha=0.5)
    checkpoint_files.write_shards(
        checkpoint_files.copy_shards(models, average), Path(folder, f"rank_{rank:05d}.safetensors")
    )
    seen: dict[str, Any] = {"weights": {}, "logprobs": {}}
    seen["adapters"] = in_full(lora.adapter_weights(policy))
    with torch.no_grad():
        for kind in ("policy", "average"):
            for name, weight in policy.named_parameters():
                if kind == "average" and name in average:
                    weight.copy_(average[name])
            seen["weights"][kind] = in_full(lora.engine_weights(policy))
            lengths, mask = torch.full((len(ROWS),), PROMPT), torch.ones(len(ROWS), ROWS.shape[1] - PROMPT)
            scored = policy(ResponseTokens.of(ROWS, lengths, mask), 1.0)
            seen["logprobs"][kind] = scored.logprobs.clone()
            fsdp.reshard(policy)
    return seen


def in_full(weights: list[ShardedWeight]) -> dict[str, Tensor]:
    full = gather.gather_full(weights, torch.float32)
    return {weight.name: tensor.clone() for weight, tensor in zip(weights, full, strict=True)}


def make(kind: str, on_ranks: OnRanks, path: Path, storage: Path) -> Made:
    """A run's folder as a run leaves it."""
    config = small(path, storage, kind, train__actor_lr=1e-3, **KINDS[kind])
    run = storage / "runs" / kind
    place = run / "step_000003"
    place.mkdir(parents=True)
    ranks = config.scaling.num_workers
    seen = on_ranks(ranks, trained, config.model_dump(), str(path), str(place))[0]
    (run / "run.json").write_text('{"mlflow_run": "0"}')
    (run / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    files = {file.name: checkpoint_catalog.file_record(Storage.local(file)) for file in place.iterdir()}
    assert len(files) == ranks
    metrics = {"eval/accuracy": 0.75, "reward/mean": 0.5, "time/step": 3.0}
    manifest = Manifest(
        rlx=__version__, step=3, ranks=ranks, metrics=metrics, tokens=0, kl={}, scores={}, cursor={}, evaluation={},
        mlflow_run_id=None, config=config.model_dump(mode="json"), files=files,
    )  # fmt: skip
    checkpoint_catalog.commit(Storage.local(place), manifest)
    return Made(config, storage, **seen)


Make = Callable[[str], Made]


@pytest.fixture(scope="module")
def made(
    on_ranks: OnRanks, tiny_model: Path, untied_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Made]:
    """Runs by kind, each made once."""
    storage, known = tmp_path_factory.mktemp("storage"), dict[str, Made]()

    def give(kind: str) -> Made:
        if kind not in known:
            known[kind] = make(kind, on_ranks, untied_model if kind == "untied" else tiny_model, storage)
        return known[kind]

    return give


def call(*words: str) -> int:
    return int(runpy.run_path(str(ROOT / "experiments" / "export.py"))["main"](words))


def exported(made: Made, out: Path, *words: str) -> Path:
    assert call(str(made.config.name), "--storage", str(made.storage), "--out", str(out), *words) == 0
    return out


@torch.no_grad()
def logprobs(lm: Any, ids: Tensor, prompt: int) -> Tensor:
    """`[B, T]` what a transformers model gives the tokens after the first `prompt`."""
    scores = torch.log_softmax(lm(input_ids=ids).logits.float(), -1)
    return scores[:, prompt - 1 : -1].gather(-1, ids[:, prompt:, None]).squeeze(-1)


def assert_as_trained(folder: Path, made: Made, weights: str = "policy") -> None:
    lm = AutoModelForCausalLM.from_pretrained(folder)
    expected = made.weights[weights]
    torch.testing.assert_close({n: p.detach() for n, p in lm.named_parameters()}, expected, atol=0, rtol=0)
    torch.testing.assert_close(logprobs(lm, ROWS, PROMPT), made.logprobs[weights], atol=1e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tied", "untied", "cut", "merged", "some"])
def test_transformers_loads_the_policy_that_was_trained(
    kind: str, made: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = made(kind)
    folder = exported(one, tmp_path / "out")
    assert_as_trained(folder, one)
    start = AutoModelForCausalLM.from_pretrained(one.config.model.path)
    assert float((logprobs(start, ROWS, PROMPT) - one.logprobs["policy"]).abs().max()) > 1e-2  # it had moved
    first, to, apart, load = capsys.readouterr().out.splitlines()
    assert (
        first == f"exported run {kind}, step 3, policy weights, float32: reward/mean 0.5  eval/accuracy 0.75"
        and to == f"to {folder}"
        and load == f'load it: transformers.AutoModelForCausalLM.from_pretrained("{folder}")'
    )
    assert apart.startswith("largest difference") and 0 <= float(apart.rpartition(" ")[2]) < 1e-5
    assert list(tmp_path.iterdir()) == [folder]


def test_the_folder_is_a_whole_model(made: Make, tmp_path: Path) -> None:
    one = made("merged")
    folder = exported(one, tmp_path / "a" / "b")
    assert {"config.json", "model.safetensors", "generation_config.json", "tokenizer.json"} <= {
        file.name for file in folder.iterdir()
    }
    assert json.loads((folder / "config.json").read_text())["dtype"] == "float32"
    assert folder.stat().st_mode & 0o777 == 0o755
    assert {file.stat().st_mode & 0o777 for file in folder.iterdir()} == {0o644}
    before, after = (AutoTokenizer.from_pretrained(path) for path in (one.config.model.path, folder))
    turn = [{"role": "user", "content": "1 + 2 - 3 ="}]
    assert after.chat_template == before.chat_template
    assert after.apply_chat_template(turn, return_dict=False) == before.apply_chat_template(turn, return_dict=False)


@pytest.mark.parametrize("kind", ["untied", "cut", "merged"])
def test_the_average_is_another_policy(kind: str, made: Make, tmp_path: Path) -> None:
    one = made(kind)
    assert_as_trained(exported(one, tmp_path / "out", "--weights", "average"), one, "average")
    assert float((one.logprobs["average"] - one.logprobs["policy"]).abs().max()) > 1e-3


@pytest.mark.slow
def test_bfloat16_is_the_trained_weights_rounded(made: Make, tmp_path: Path) -> None:
    one = made("bfloat16")
    folder = exported(one, tmp_path / "out", "--checkpoint", "3")
    lm = AutoModelForCausalLM.from_pretrained(folder)
    expected = {name: weight.to(torch.bfloat16) for name, weight in one.weights["policy"].items()}
    torch.testing.assert_close({n: p.detach() for n, p in lm.named_parameters()}, expected, atol=0, rtol=0)
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["merged", "some"])
def test_adapters_alone_are_what_peft_loads(
    kind: str, made: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = made(kind)
    folder = exported(one, tmp_path / "out", "--adapter")
    assert sorted(file.name for file in folder.iterdir() if file.name != "README.md") == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    lm = AutoPeftModelForCausalLM.from_pretrained(str(folder))
    torch.testing.assert_close(logprobs(lm, ROWS, PROMPT), one.logprobs["policy"], atol=1e-5, rtol=0)
    assert capsys.readouterr().out.splitlines()[-1].startswith("load it: peft.AutoPeftModelForCausalLM")
    written = {name.replace(".default.", "."): p for name, p in lm.named_parameters() if ".lora_" in name}
    torch.testing.assert_close({n: p.detach() for n, p in written.items()}, one.adapters, atol=0, rtol=0)


@pytest.mark.slow  # it takes an engine of its own
def test_vllm_loads_it(ray_cluster: None, made: Make, tmp_path: Path) -> None:
    one = made("merged")
    folder = exported(one, tmp_path / "out")
    engine = start_engine(folder)
    try:
        prompts = [Prompt(i, tuple(row[: 4 + i].tolist()), "", "") for i, row in enumerate(ROWS)]
        sampling = Sampling(temperature=1.0, top_p=1.0, top_k=-1, max_tokens=8, stop_token_ids=())
        ray.get(engine.__ray_call__.remote(lambda actor: setattr(actor, "version", 0)))  # as if it had been sent them
        rollouts = EnginePool([engine], seed=0)
        rollouts.finish(draw := rollouts.begin(prompts, [sampling], 0), 0)
    finally:
        stop_engine(engine)
    lm = AutoModelForCausalLM.from_pretrained(folder)
    assert len(draw.completions) == len(prompts)
    for completion in draw.completions:
        prompt = completion.prompt.token_ids
        found = logprobs(lm, torch.tensor([prompt + completion.token_ids]), len(prompt))
        torch.testing.assert_close(torch.tensor([completion.logprobs]), found, atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("named", ["folder", "run's folder", "at"])
def test_a_checkpoint_has_many_names(
    named: str, made: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one = made("tied")
    monkeypatch.chdir(tmp_path)
    names = {
        "folder": [str(one.folder / "step_000003")],
        "run's folder": [str(one.folder), "--checkpoint", "best"],
        "at": ["tied@newest", "--storage", str(one.storage)],
    }
    assert call(*names[named]) == 0
    assert_as_trained(tmp_path / "exports" / "tied-step_000003", one)  # the default
    assert f"to {tmp_path}/exports/tied-step_000003\n" in capsys.readouterr().out


@pytest.mark.slow
def test_a_checkpoint_on_s3(made: Make, bucket: str, tmp_path: Path) -> None:
    one, place = made("untied"), open_storage(bucket)
    fs.copy_files(str(one.folder), f"{place.path}/runs/untied", destination_filesystem=place.filesystem)
    assert call("untied@best", "--storage", bucket, "--out", str(tmp_path / "out")) == 0
    assert_as_trained(tmp_path / "out", one)
    assert call(f"{bucket}/runs/untied", "--checkpoint", "best", "--out", str(tmp_path / "again")) == 0
    assert_as_trained(tmp_path / "again", one)


# --- refused


Refused = Callable[..., str]


@pytest.fixture
def refused(made: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Refused:
    """Calls the script in vain, and gives its one line; nothing is left of it."""

    def run(*words: str, storage: Path | None = None) -> str:
        before = sorted(tmp_path.rglob("*"))
        assert call(*words, "--storage", str(storage or made("tied").storage)) == 1
        error = capsys.readouterr().err
        assert error.startswith("error: ") and error.count("\n") == 1, error
        assert sorted(tmp_path.rglob("*")) == before
        return error.removeprefix("error: ").strip()

    return run


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["tyed"], "no run 'tyed' in .*/runs; nearest: tied"),
        (["tied@7"], "no checkpoint 7 in .*/tied, there are newest, best, step_000003"),
        (["tied", "--checkpoint", "bst"], "no checkpoint bst in .*; nearest: best"),
        (["tied@3", "--checkpoint", "best"], "--checkpoint best needs a run's name, folder or address: tied@3 names a"),
        (["tied", "--weights", "average"], "run tied keeps no average of its weights: it has no train.ema_decay"),
        (["tied", "--adapter"], "run tied has no adapters: its model.lora_rank is 0"),
        (["/no/such/folder"], "no complete checkpoint in /no/such/folder"),
    ],
)
def test_what_is_not_there_is_refused(words: Sequence[str], said: str, refused: Refused, tmp_path: Path) -> None:
    assert_said(refused(*words, "--out", str(tmp_path / "out")), said)


def assert_said(line: str, said: str) -> None:
    with pytest.raises(RuntimeError, match=f"^{said}"):
        raise RuntimeError(line)


def test_what_is_there_is_never_overwritten(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").touch()
    assert_said(refused("tied", "--out", str(tmp_path / "out")), "--out .*/out exists already: give another folder")
    assert_said(refused("tied", "--out", str(tmp_path / "out" / "mine.txt")), "--out .*/mine.txt exists already")


def test_an_empty_folder_is_taken(made: Make, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert_as_trained(exported(made("tied"), tmp_path / "out"), made("tied"))


@pytest.fixture
def copied(made: Make, tmp_path: Path) -> Path:
    """The checkpoint of a storage of its own, to be spoilt."""
    shutil.copytree(made("tied").folder, tmp_path / "storage" / "runs" / "tied")
    return tmp_path / "storage" / "runs" / "tied" / "step_000003"


def test_an_unfinished_checkpoint_is_refused(copied: Path, refused: Refused, tmp_path: Path) -> None:
    (copied / "manifest.json").unlink()
    line = refused("tied", "--out", str(tmp_path / "out"), storage=tmp_path / "storage")
    assert_said(line, r"no complete checkpoint in .*/tied \(step_000003: no manifest.json: it was never finished\)")
    assert_said(refused(str(copied), "--out", str(tmp_path / "out")), "checkpoint .*/step_000003 is not complete")


def test_a_single_flipped_bit_is_refused(copied: Path, refused: Refused, tmp_path: Path) -> None:
    file = copied / "rank_00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-1000] ^= 1
    file.write_bytes(content)
    line = refused("tied", "--out", str(tmp_path / "out"), storage=tmp_path / "storage")
    assert line == "checkpoint step_000003: rank_00000.safetensors is damaged: its checksum differs"


def test_a_checkpoint_of_another_model_is_refused(
    made: Make, untied_model: Path, refused: Refused, copied: Path, tmp_path: Path
) -> None:
    manifest = checkpoint_catalog.read_checkpoint(Storage.local(copied)).manifest
    assert manifest
    out = str(tmp_path / "out")
    for path, said in ((untied_model, "the checkpoint has no policy.model.lm.lm_head.weight"), ("/gone", ".*/gone")):
        config = manifest.config | {"model": manifest.config["model"] | {"path": str(path)}}
        checkpoint_catalog.commit(Storage.local(copied), manifest.model_copy(update={"config": config}))
        assert_said(refused(str(copied), "--out", out), said)


@pytest.mark.parametrize("adapter", [False, True])
def test_nothing_is_left_of_what_is_not_the_policy(
    adapter: bool, made: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The comparison sees that the adapters are forgotten."""
    write = export._write

    def wrong(policy: Any, *rest: Any) -> None:
        with torch.no_grad():
            for name, weight in policy.named_parameters():
                if ".lora_B." in name:
                    weight.zero_()
        write(policy, *rest)

    one = made("merged")
    monkeypatch.setattr(export, "_write", wrong)
    with pytest.raises(
        export.ExportError, match=r"they differ by up to \S+, more than 0.0001; the folder was deleted"
    ) as no:
        export.export(one.entry, export.Export(one.config, adapter=adapter), tmp_path / "out")
    assert "\n" not in str(no.value)
    assert list(tmp_path.iterdir()) == []


def test_a_prompt_file_need_not_be_there(made: Make, tmp_path: Path) -> None:
    one = made("tied")
    data = one.config.data.model_copy(update={"source": "/gone.jsonl", "params": {}, "system_prompt": "Add."})
    config = one.config.model_copy(update={"data": data})
    assert export.export(one.entry, export.Export(config), tmp_path / "out") < 1e-5


def test_a_folder_that_cannot_be_written_is_one_line(
    made: Make, refused: Refused, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(*rest: Any) -> None:
        raise SafetensorError("No space left\non device")

    monkeypatch.setattr(export, "_write_model", full)
    line = refused("tied", "--out", str(tmp_path / "out"))
    assert line == f"{tmp_path} cannot be written: No space left on device; --out names another folder"


def test_an_export_to_a_full_disk_names_it_and_leaves_nothing(made: Make, refused: Refused, tmp_path: Path) -> None:
    with s3.small_disk(tmp_path / "disk", "64k") as disk:
        line = refused("tied", "--out", str(disk / "out"))
        assert line.startswith(f"{disk} cannot be written: ") and line.endswith("; --out names another folder")
        assert list(disk.iterdir()) == []
