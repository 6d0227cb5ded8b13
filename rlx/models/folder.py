"""What can be said of a model's folder without loading the model: its files, its shape, how many parameters it has.

Imports neither torch nor transformers, so that a wrong folder is refused at once. Left out: loading (loading.py).
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlx.config.addresses import may_be_on_hub
from rlx.config.errors import ConfigError, one_line, where_looked
from rlx.config.reach import ANSWER_S, why_silent
from rlx.config.sections.model import ModelConfig
from rlx.config.sections.train import TrainConfig

_TOKENIZER_FILES = ("*token*", "*vocab*", "*.model", "*.tiktoken")
_WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")  # which transformers loads
_LARGEST_HEADER = 100 << 20  # bytes, as safetensors has it
_CHECKPOINT_BYTES, _AVERAGE_BYTES = 12, 4  # of each number, in float32: with AdamW's two averages; train.ema_decay's
_SCORING_LAYERS = ("score", "classif")  # in the names of the weights that give a sequence its score
_PLAIN_LOGITS = {"final_logit_softcapping": None, "logit_scale": 1, "logits_scaling": 1, "lm_head_multiplier": 1}
"""what Gemma 2, Cohere, Granite and Falcon H1 call a change of their logits, and the value that changes nothing"""

_ADAPTERS = (
    "adapters of peft; rlx export without --adapter, or peft's merge_and_unload, makes a model; --from RUN continues "
    "adapters"
)
_NO_MODEL = "not a Hugging Face model, it has no config.json"
_CHECKPOINT_FILE, _RUN_FILE = "manifest.json", "run.json"  # of what rlx itself writes while it trains


@dataclass(frozen=True)
class ModelShape:
    """What a model's config.json says of its size; None where it says nothing."""

    positions: int | None = None
    heads: int | None = None
    width: int | None = None  # of hidden states

    @classmethod
    def read(cls, path: str, setting: str = "model.path") -> ModelShape:
        """Raises ConfigError if config.json is no JSON object."""
        content = _config_json(path, setting)
        known = {name: value for name, value in content.items() if isinstance(value, int)}  # some have one per layer
        positions = known.get("max_position_embeddings") or known.get("n_positions")  # the latter in GPT-2
        return cls(positions, known.get("num_attention_heads"), known.get("hidden_size") or known.get("n_embd"))

    def check(self, path: str, *, positions: int, tensor_parallel: int, lora_rank: int) -> None:
        """Raises ConfigError for longer texts than the model has positions, for engines that cannot share its heads, or
        for adapters of a higher rank than the layers beside them have."""
        if self.positions and positions > self.positions:
            raise ConfigError(
                f"data.max_prompt_tokens + rollout.max_tokens = {positions}, but {path} has {self.positions} positions"
            )
        if self.heads and self.heads % tensor_parallel:
            raise ConfigError(
                f"rollout.tensor_parallel {tensor_parallel} does not divide the {self.heads} attention heads of {path}"
            )
        if self.width and lora_rank > self.width:
            raise ConfigError(
                f"model.lora_rank {lora_rank}: no layer of {path} has a higher rank than {self.width}, its hidden_size"
            )


def _config_json(path: str, setting: str) -> dict[str, Any]:
    """The content of a folder's config.json; raises ConfigError if it is no JSON object."""
    try:
        content = json.loads((Path(path) / "config.json").read_text())
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise ConfigError(f"{setting} {path}: its config.json is not a JSON object")
    return content


def is_model_folder(path: str, setting: str) -> bool:
    """Returns whether a path is a Hugging Face model on disk (True) or may be a name on the hub (False).

    Raises:
        ConfigError: it is neither.
    """
    folder = Path(path)
    if not path or folder.is_file():
        raise ConfigError(f"{setting} {path or 'is empty'}: expected the folder of a model, or its name on the hub")
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            if (folder / "adapter_config.json").is_file():
                raise ConfigError(f"{setting} {path}: {_ADAPTERS}")
            raise ConfigError(f"{setting} {path}: {_of_training(folder) or _NO_MODEL}")
        return True
    if "@" in folder.name:  # which no name on the hub has
        raise ConfigError(
            f"{setting} {path}: no such folder; of a checkpoint of a run, rlx export {path} makes the folder of a model"
        )
    if page := re.match(r"https?://(?:huggingface\.co|hf\.co)/([^/]+/[^/?#]+)", path):
        raise ConfigError(f"{setting} {path}: no such folder; the name on the hub is {page[1]}")
    if not may_be_on_hub(path):
        raise ConfigError(f"{setting} {path}: no such folder{where_looked(path)}")
    return False


def _of_training(folder: Path) -> str:
    """The message that a folder of rlx's own has no model, and how one is made of it; empty for other folders."""
    named = folder if len(folder.parts) > 1 else f"./{folder}"  # a lone name would be that of a run
    for file, kind in ((_CHECKPOINT_FILE, "a checkpoint of training"), (_RUN_FILE, "a run")):
        if (folder / file).is_file():
            return (
                f"{kind}, not a model: rlx export {named} makes a folder of its model, or --from {named} starts from it"
            )
    return ""


def shape_on_hub(name: str) -> ModelShape:
    """What the Hugging Face hub, or its cache here, says of a model's size; nothing if neither knows it."""
    try:
        return ModelShape.read(str(Path(_hub_config(name)).parent))
    except ConfigError:
        raise
    except (OSError, ValueError):  # which errors of the hub and of a bad name are
        return ModelShape()


def check_hub_name(name: str, setting: str) -> None:
    """Raises ConfigError if the hub has no such model, or does not answer and none is in the cache, or it cannot be
    trained."""
    from huggingface_hub import errors

    try:
        _check_logits(str(Path(_hub_config(name)).parent), name, setting)
    except (errors.LocalEntryNotFoundError, ConnectionError) as error:
        reason = one_line(error, 200)
        raise ConfigError(
            f"{setting} {name}: no folder here, not in the cache of the Hugging Face hub, and the hub does not answer "
            f"({reason})"
        ) from None
    except (errors.HFValidationError, errors.RepositoryNotFoundError, errors.EntryNotFoundError) as error:
        reason = one_line(error, 200)
        raise ConfigError(f"{setting} {name}: no folder here, and no model of the Hugging Face hub: {reason}") from None
    except OSError:  # the hub has said something else: the workers will see
        return


def _hub_config(name: str) -> str:
    """The path of a model's config.json in the cache of the Hugging Face hub; from the hub if it is not there.

    Raises:
        ConnectionError: the hub does not answer; without this check its client would try for half a minute.
        OSError, ValueError: the errors of the hub's client.
    """
    import huggingface_hub
    from huggingface_hub import constants

    if isinstance(cached := huggingface_hub.try_to_load_from_cache(name, "config.json"), str):
        return cached
    if not constants.HF_HUB_OFFLINE and (reason := why_silent(constants.ENDPOINT)):
        raise ConnectionError(reason)
    return str(huggingface_hub.hf_hub_download(name, "config.json", etag_timeout=ANSWER_S))


def check_model_files(path: str, setting: str) -> None:
    """Raises ConfigError if a model's folder has no tokenizer, a damaged one, or no weights, or cannot be trained."""
    folder = Path(path)
    if not _has_any(folder, _TOKENIZER_FILES):
        raise ConfigError(
            f"{setting} {path}: it has no tokenizer (tokenizer.json): tokenizer.save_pretrained writes it"
        )
    if not _has_any(folder, _WEIGHT_FILES):
        raise ConfigError(f"{setting} {path}: it has no weights (model.safetensors): model.save_pretrained writes them")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (file := folder / name).is_file():
            _check_json(file, setting)
    _check_logits(path, path, setting)


def _check_logits(folder: str, name: str, setting: str) -> None:
    """Raises ConfigError if a model's config.json says that it changes the logits of its output layer.

    Log-probabilities are computed from these logits as they are. Models that change them in a way that is not known
    here are refused when they are loaded (`loading.load_policy`).
    """
    if setting in ("model.critic_path", "reward.model"):  # their logits are not used
        return
    content = _config_json(folder, setting)
    of_text = content.get("text_config")  # where a model also takes images
    for part in (content, of_text if isinstance(of_text, dict) else {}):
        for key, plain in _PLAIN_LOGITS.items():
            if part.get(key) not in (None, plain):
                raise ConfigError(
                    f"{setting} {name}: {key} {part[key]} in its config.json changes the logits of its output layer, "
                    f"which rlx does not train: take a model that leaves them, such as Llama, Qwen or Gemma 3"
                )


def check_classifier(path: str, setting: str) -> None:
    """Raises ConfigError if a model's folder lacks files, or plainly holds no sequence classifier with one label.

    A model with code of its own may call its layers as it likes and have other defaults, and weights in other files
    than safetensors are not looked at: whoever loads it says what is wrong.
    """
    check_model_files(path, setting)
    content = _config_json(path, setting)
    if "auto_map" in content:
        return
    layers = [name for file in Path(path).glob("*.safetensors") for name, _ in _tensors(file)]
    has_score = any(part in name for name in layers for part in _SCORING_LAYERS)
    if layers and not has_score and "Classification" not in str(content.get("architectures")):
        raise ConfigError(f"{setting} {path}: not a sequence classifier, its weights have no layer that scores")
    named = content.get("id2label")
    labels = content.get("num_labels", len(named) if isinstance(named, dict) else 2)  # as transformers reads it
    if labels != 1:
        raise ConfigError(f"{setting} {path}: its classifier has {labels} labels, expected 1")


def check_same_tokens(path: str, other: str, setting: str) -> None:
    """Raises ConfigError if the tokenizers in two folders number tokens differently.

    Tokenizers without a tokenizer.json are not compared here.
    """
    files = [Path(folder, "tokenizer.json") for folder in (path, other)]
    if not all(file.is_file() for file in files):
        return
    own, theirs = (_numbered_tokens(file, setting) for file in files)
    if own != theirs:
        raise ConfigError(f"{setting} {other}: its tokenizer is another one than that of {path}")


def _numbered_tokens(file: Path, setting: str) -> list[Any]:
    """The parts of a tokenizer.json that say which number each token has."""
    _check_json(file, setting)
    content = json.loads(file.read_bytes())
    if not isinstance(content, dict) or not isinstance(content.get("model"), dict):
        raise ConfigError(f"{setting} {file}: not a tokenizer of Hugging Face")
    added = [token for token in content.get("added_tokens") or () if isinstance(token, dict)]
    return [content["model"].get("vocab"), [(token.get("id"), token.get("content")) for token in added]]


def _has_any(folder: Path, patterns: tuple[str, ...]) -> bool:
    return any(file.is_file() for pattern in patterns for file in folder.glob(pattern))


def _check_json(file: Path, setting: str) -> None:
    try:
        json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{setting} {file}: damaged, or not downloaded completely: {one_line(error, 200)}") from None


def count_parameters(path: str) -> int:
    """Returns how many numbers the safetensors files of a model's folder hold; 0 if it has none that can be read."""
    files = sorted(Path(path).glob("*.safetensors"))
    return sum(math.prod(entry["shape"]) for file in files for _, entry in _tensors(file))


def checkpoint_bytes(path: str, model: ModelConfig, train: TrainConfig, critic: str) -> int:
    """Returns about how many bytes a checkpoint of a run takes that trains the model of a folder.

    Adapters count as nothing; a separate critic is trained as a whole beside them, too.
    """
    each = 0 if model.lora_rank else _CHECKPOINT_BYTES + (_AVERAGE_BYTES if train.ema_decay else 0)
    size = count_parameters(path) * each if each else 0
    return size + (count_parameters(model.critic_path or path) * _CHECKPOINT_BYTES if critic == "separate" else 0)


def _tensors(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields each tensor's name and what the header of a safetensors file says of it; nothing if it is damaged."""
    try:
        with file.open("rb") as stream:
            (size,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(size)) if size < _LARGEST_HEADER else {}
        yield from (item for item in header.items() if item[0] != "__metadata__")
    except (struct.error, ValueError, AttributeError):  # whoever loads the weights says what is wrong
        return
