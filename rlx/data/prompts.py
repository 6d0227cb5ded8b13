"""Prompt tables: rows with the token ids of their prompts, made once per run in parallel tasks of Ray Data.

One task loads the model's tokenizer, and the others get a copy: to load one takes seconds of imports in each process,
to unpickle one does not. The content of a model folder's tokenizer files travels to it, because the folder may be on
this node's disk alone; a name on the hub is looked up on the node.
Left out: where rows come from (sources.py) and which rank trains on which row (stream.py).
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
import pickle
import tempfile
import zlib
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rlx.config.errors import ConfigError, nearest, one_line
from rlx.config.sections.data import TEMPLATE_OWN, DataConfig
from rlx.data import ray_data
from rlx.data.limits import limited
from rlx.data.stored.columns import SCHEMA, ChatMessage, with_system
from rlx.types import SYSTEM_ROLES

if TYPE_CHECKING:
    import ray.data

_LOG = logging.getLogger("rlx")
_BLOCK_ROWS = 32_768  # of rows that are not in blocks yet
_BATCH = 1024  # questions in one call of the tokenizer
_TEMPLATE_S, _TEMPLATE_BYTES = 60.0, 2 << 30  # for a batch of prompts
_TEMPLATE_LENGTH = 1_000_000  # characters that a chat template may add to a question
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx")
"""suffixes of files that no tokenizer reads"""


def tokenize_rows(
    rows: ray.data.Dataset | Iterable[dict[str, Any]],
    config: DataConfig,
    tokenizer: TokenizerSource,
    what: str = "prompts",
    keeps_messages: bool = False,
) -> ray.data.MaterializedDataset:
    """Returns the rows with a column `token_ids`: the question or the conversation in the model's chat template.

    Rows with more than `data.max_prompt_tokens` tokens are left out, with a warning.

    Args:
        rows: {question, answer[, messages][, entry]} each.
        tokenizer: of the model.
        what: the rows are, for the warning and for errors.
        keeps_messages: what is returned has a column `messages`, the conversation of each row as the policy reads it.

    Raises:
        ConfigError: the tokenizer cannot be used, or no prompt is short enough.
    """
    ray_data.configure()
    source = _in_blocks(rows).materialize()
    encoder = PromptEncoder(tokenizer, config.system_prompt, config.chat_template_args)
    try:
        tokenizer.wait()
        table = source.map_batches(
            _tokenize_block,
            fn_kwargs={
                "encoder": encoder,
                "max_tokens": config.max_prompt_tokens,
                "keeps_messages": keeps_messages,
            },
            batch_format="pyarrow",
            batch_size=None,
            num_cpus=0,
            concurrency=min(ray_data.tasks_at_once(), source.num_blocks()),
        ).materialize()
    except Exception as error:
        raise ConfigError(f"model.path {tokenizer.model}: its tokenizer: {ray_data.error_reason(error)}") from None
    _report_long_prompts(source.count(), table.count(), config.max_prompt_tokens, what)
    return table


def _in_blocks(rows: ray.data.Dataset | Iterable[dict[str, Any]]) -> ray.data.Dataset:
    import ray.data

    if isinstance(rows, ray.data.Dataset):
        return rows
    rows = list(rows)
    return ray.data.from_items(rows, override_num_blocks=max(1, -(-len(rows) // _BLOCK_ROWS)))


def _report_long_prompts(total: int, left: int, max_tokens: int, what: str) -> None:
    """Warns if some prompts are too long; raises ConfigError if all are."""
    too_long = f"{total - left} of {total} {what} are longer than data.max_prompt_tokens ({max_tokens})"
    if not left:
        raise ConfigError(f"no prompt is left: {too_long}")
    if left < total:
        _LOG.warning("%s and left out", too_long)


# ---------------------------------------------------------------------------------------------------------------------
# Arguments of chat templates


class _Generation(jinja2.ext.Extension):
    """Lets templates have the block `generation`, with which transformers finds what the model has said."""

    tags = {"generation"}  # noqa: RUF012  # jinja's own

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


_OF_TRANSFORMERS = ("tools", "documents", "raise_exception", "strftime_now")
"""names in chat templates that transformers gives a value; besides special tokens, such as bos_token"""


def check_template(
    given: Mapping[str, Any], chats: Sequence[Sequence[ChatMessage]], model: str, trust_remote_code: bool = False
) -> None:
    """Raises ConfigError if a model's chat template reads an argument nowhere, or does not take a conversation.

    The argument would be ignored without a word. To load the tokenizer takes seconds, so it is done only if there are
    arguments or conversations.

    Args:
        given: `data.chat_template_args`.
        chats: the conversations of the first rows, without `data.system_prompt`.
        model: its folder, or its name on the hub.
    """
    if not given and not chats:
        return
    try:
        tokenizer = load_tokenizer(model, trust_remote_code)
        if not (unknown := _unknown_argument(tokenizer.chat_template, given, model)):
            encode_prompts(tokenizer, chats, None, given)
    except Exception as error:  # of code that the model brings, too
        raise ConfigError(f"model.path {model}: its tokenizer: {one_line(error)}") from None
    if unknown:
        raise ConfigError(unknown)


def _unknown_argument(template: Any, given: Mapping[str, Any], model: str | None = None) -> str | None:
    """What is wrong with the arguments of a tokenizer's chat template; None if it reads them all.

    Args:
        template: a text, several by their names, or none.
        model: the folder or name of the model that has it, for the message.

    Raises:
        ValueError: the template is no template, or takes too long or too much memory.
    """
    if not given:
        return None
    if not template:
        found = f"{model or 'the tokenizer'} has no chat template"
        return f"data.chat_template_args: {next(iter(given))} is read by nothing: {found}"
    what = f"the chat template of {model}" if model else "its chat template"
    texts = list(template.values()) if isinstance(template, Mapping) else [template]
    read = set[str]().union(*map(_variables, texts))
    for name in given:
        if name not in read:
            usual = {*TEMPLATE_OWN, *_OF_TRANSFORMERS}
            own = sorted(each for each in read - usual if not each.endswith("_token"))
            hint = nearest(name, own) or (f"; there are {', '.join(own)}" if own else ", which has none")
            return f"data.chat_template_args: {name} is not a variable of {what}{hint}"
    return None


def _variables(template: str) -> set[str]:
    """The names that a chat template reads and does not set before; raises as `_unknown_argument`."""
    known = jinja2.sandbox.ImmutableSandboxedEnvironment(extensions=[_Generation, jinja2.ext.loopcontrols])
    try:
        with limited("the chat template", _TEMPLATE_S, _TEMPLATE_BYTES):  # jinja computes what is constant
            return jinja2.meta.find_undeclared_variables(known.parse(template))
    except jinja2.TemplateError as error:
        raise ValueError(f"its chat template: {one_line(error)}") from None


# ---------------------------------------------------------------------------------------------------------------------
# Tokens


def load_tokenizer(model: str, trust_remote_code: bool = False) -> Any:
    """Returns the tokenizer of a model, by its folder or name."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model, trust_remote_code=trust_remote_code)


def encode_prompts(
    tokenizer: Any,
    given: Sequence[str | Sequence[ChatMessage]],
    system_prompt: str | None,
    template_args: Mapping[str, Any] | None = None,
) -> list[list[int]]:
    """Returns the token ids `[P]` of each question or conversation in the tokenizer's chat template.

    Without a template a question is bare text, after the system message.

    Args:
        system_prompt: the system message of those that have none.
        template_args: further arguments of the template.

    Raises:
        ValueError: the template takes too long or too much memory, or knows an argument not; or there is none, and a
            conversation has several messages.
    """
    if not given:
        return []
    chats = [with_system(each, system_prompt) for each in given]
    if unknown := _unknown_argument(tokenizer.chat_template, template_args or {}):
        raise ValueError(unknown)
    if not tokenizer.chat_template:
        return _text_ids(tokenizer, [_bare_text(chat) for chat in chats], add_special_tokens=True)
    with limited("the chat template", _TEMPLATE_S, _TEMPLATE_BYTES):
        texts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False, **template_args or {})
    most = max(sum(len(message["content"]) for message in chat) for chat in chats)
    if (longest := max(map(len, texts))) > most + _TEMPLATE_LENGTH:
        raise ValueError(f"the chat template makes {longest:,} characters of a question")
    return _text_ids(tokenizer, texts, add_special_tokens=False)


def _text_ids(tokenizer: Any, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
    """The token ids of each text, as `tokenizer(texts)` gives them.

    That takes more than twice as long, because it makes several more lists for each text, and the place in the text of
    each token. So the library below the tokenizer is asked for the ids alone. The tokenizer does the first text, which
    prepares the library, and shows whether this tokenizer does more than the library.
    """
    first = list(tokenizer(texts[0], add_special_tokens=add_special_tokens).input_ids)
    if getattr(tokenizer, "is_fast", False):
        found = tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
        if found[0].ids == first:
            return [each.ids for each in found]
    return [list(ids) for ids in tokenizer(texts, add_special_tokens=add_special_tokens).input_ids]


def _bare_text(chat: Sequence[ChatMessage]) -> str:
    said = [message for message in chat if message["role"] not in SYSTEM_ROLES]
    if len(said) > 1:
        raise ValueError(f"there is no chat template, which a conversation of {len(said)} messages needs")
    return "\n\n".join(message["content"] for message in chat)


def encode_prompt(
    tokenizer: Any,
    given: str | Sequence[ChatMessage],
    system_prompt: str | None,
    template_args: Mapping[str, Any] | None = None,
) -> list[int]:
    """Returns the token ids `[P]` of one question or conversation; see `encode_prompts`."""
    return encode_prompts(tokenizer, [given], system_prompt, template_args)[0]


@dataclass(frozen=True)
class TokenizerSource:
    """A tokenizer that any process on any node can have: the name of one on the hub or the content of its files, and a
    pickled copy of what was loaded from them."""

    model: str  # its name, or the folder that the files are from
    trust_remote_code: bool
    checksum: int = 0  # of the files
    files: Any = field(default=None, compare=False)  # a reference to {name: content}; None: it is on the hub
    copy: Any = field(default=None, compare=False)  # a reference to the pickled tokenizer, or to None: see `_pickled`

    @classmethod
    def of(cls, model: str, trust_remote_code: bool = False) -> TokenizerSource:
        """Puts the files of a folder into the object store, and starts a task that loads the tokenizer."""
        import ray

        source = cls(model, trust_remote_code)
        if Path(model).is_dir():
            files = tokenizer_files(Path(model))
            checksum = zlib.crc32(repr(sorted(files.items())).encode())
            source = cls(model, trust_remote_code, checksum, ray.put(files))
        return replace(source, copy=ray.remote(num_cpus=0)(_pickled).remote(source))

    def wait(self) -> None:
        """Returns when the tokenizer was loaded; raises what that raised."""
        import ray

        ray.get(self.copy)


def tokenizer_files(folder: Path) -> Mapping[str, bytes]:
    """Returns the content of a model folder's files without the weights, by their paths in it."""
    paths = [path for path in itertools.chain(folder.glob("*"), folder.glob("*/*.jinja")) if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths if path.suffix not in _WEIGHTS}


def _pickled(source: TokenizerSource) -> bytes | None:
    """Loads a tokenizer and returns it pickled; None if another process could not unpickle it. Runs in a task."""
    tokenizer = _load(source)
    if not type(tokenizer).__module__.startswith("transformers."):  # code from the model's folder
        return None
    try:
        return pickle.dumps(tokenizer)
    except Exception:
        return None


@functools.cache  # once per process
def _load(source: TokenizerSource) -> Any:
    import ray

    if source.copy is not None and (copy := ray.get(source.copy)) is not None:
        return pickle.loads(copy)
    if source.files is None:
        return load_tokenizer(source.model, source.trust_remote_code)
    with tempfile.TemporaryDirectory() as folder:
        for name, content in ray.get(source.files).items():
            path = Path(folder, name)
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(content)
        try:
            return load_tokenizer(folder, source.trust_remote_code)
        except Exception as error:
            raise ValueError(str(error).replace(folder, source.model)) from None


@dataclass(frozen=True)
class PromptEncoder:
    """Turns questions and conversations into token ids, in a task."""

    tokenizer: TokenizerSource
    system_prompt: str | None
    template_args: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, given: Sequence[str | Sequence[ChatMessage]]) -> Iterator[list[int]]:
        tokenizer = _load(self.tokenizer)
        with _one_thread():
            for start in range(0, len(given), _BATCH):
                batch = given[start : start + _BATCH]
                yield from encode_prompts(tokenizer, batch, self.system_prompt, self.template_args)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Keeps tokenizers from starting threads of their own: there is a task for each CPU."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


def _tokenize_block(batch: pa.Table, encoder: PromptEncoder, max_tokens: int, keeps_messages: bool) -> pa.Table:
    """Adds `token_ids` to one block of rows and drops rows with more than `max_tokens`; runs in a Ray task.

    Raises:
        ValueError: a row has no token, which engines refuse.
    """
    given: list[Any] = batch["question"].to_pylist()
    if "messages" in batch.column_names:
        conversations = batch["messages"].to_pylist()
        given = [chat or question for chat, question in zip(conversations, given, strict=True)]
        batch = batch.drop_columns(["messages"])
    if keeps_messages:
        given = [with_system(each, encoder.system_prompt) for each in given]
        batch = batch.append_column(SCHEMA.field("messages"), pa.array(given, SCHEMA.field("messages").type))
    token_ids = _joined(encoder(given))
    lengths = pc.list_value_length(token_ids)
    if (empty := pc.index(lengths, pa.scalar(0, lengths.type)).as_py()) >= 0:
        raise ValueError(f"it makes no token of the question {batch['question'][empty].as_py()!r:.80}")
    return batch.append_column("token_ids", token_ids).filter(pc.less_equal(lengths, max_tokens))


def _joined(rows: Iterable[Sequence[int]]) -> pa.ListArray:
    """Lists of token ids as one array; `pa.array` of such lists takes as long as the tokenizer."""
    values, ends = array("i"), array("i", [0])
    for row in rows:
        values.extend(row)
        ends.append(len(values))
    return pa.ListArray.from_arrays(pa.array(ends, pa.int32()), pa.array(np.frombuffer(values, np.int32)))
