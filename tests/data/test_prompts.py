"""The prompt table: token ids of prompts, made in real Ray tasks."""

import json
import logging
import resource
import shutil
import signal
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import ray.data
from ray.util.placement_group import placement_group, remove_placement_group

from rlx.config.errors import ConfigError
from rlx.config.loading import from_tree
from rlx.config.sections.data import DataConfig, EvalConfig
from rlx.data import prompts, sources
from rlx.data.blocks import SMALL, rows_of
from rlx.data.reasoning_gym import generated_questions
from rlx.data.stream import Share
from rlx.data.tables import source_tables, supervised_table
from rlx.models import tiny

pytestmark = pytest.mark.usefixtures("ray_cluster")

LONG = "a question of 25 letters?"


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a character-level tokenizer whose chat template marks the roles."""
    folder = tmp_path_factory.mktemp("chat")
    tiny.build_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def base_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same without a chat template."""
    folder = tmp_path_factory.mktemp("base")
    tokenizer = tiny.build_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(folder)
    return str(folder)


def rows(*questions: str) -> list[dict[str, Any]]:
    return [{"question": question, "answer": "1", "entry": i} for i, question in enumerate(questions)]


def decoded(table: ray.data.Dataset, model: str) -> list[str]:
    tokenizer = prompts.load_tokenizer(model)
    return [tokenizer.decode(row["token_ids"]) for row in table.take_all()]


def test_the_chat_template_and_the_system_message_are_applied(chat_model: str) -> None:
    plain = prompts.tokenize_rows(rows("1 + 1?"), DataConfig(), prompts.TokenizerSource.of(chat_model))
    assert decoded(plain, chat_model) == ["<|user|>1 + 1?<|assistant|>"]
    directed = prompts.tokenize_rows(
        rows("1 + 1?"), DataConfig(system_prompt="Be brief."), prompts.TokenizerSource.of(chat_model)
    )
    assert decoded(directed, chat_model) == ["<|system|>Be brief.<|user|>1 + 1?<|assistant|>"]
    assert plain.take_all()[0] | {"token_ids": None} == rows("1 + 1?")[0] | {"token_ids": None}


def test_a_model_without_a_chat_template_gets_the_bare_text(base_model: str) -> None:
    assert decoded(
        prompts.tokenize_rows(rows("1 + 1?"), DataConfig(), prompts.TokenizerSource.of(base_model)), base_model
    ) == ["1 + 1?"]
    directed = prompts.tokenize_rows(
        rows("1 + 1?"), DataConfig(system_prompt="Be brief."), prompts.TokenizerSource.of(base_model)
    )
    assert decoded(directed, base_model) == ["Be brief.\n\n1 + 1?"]


CHAT = [
    {"role": "user", "content": "1 + 1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "and 1?"},
]


def test_a_conversation_is_the_prompt_and_keeps_its_own_system_message(chat_model: str) -> None:
    own = [{"role": "system", "content": "Be kind."}, *CHAT]
    given = [row | {"messages": chat} for row, chat in zip(rows("x", "y", "1?"), [CHAT, own, None], strict=True)]
    table = prompts.tokenize_rows(given, DataConfig(system_prompt="Add."), prompts.TokenizerSource.of(chat_model))
    turns = "<|user|>1 + 1?<|assistant|>2<|end|><|user|>and 1?<|assistant|>"
    assert decoded(table, chat_model) == [
        f"<|system|>Add.{turns}",
        f"<|system|>Be kind.{turns}",
        "<|system|>Add.<|user|>1?<|assistant|>",
    ]
    assert [row["question"] for row in table.take_all()] == ["x", "y", "1?"]
    assert "messages" not in table.columns()
    source = prompts.TokenizerSource.of(chat_model)
    kept = prompts.tokenize_rows(given, DataConfig(system_prompt="Add."), source, keeps_messages=True).take_all()
    assert [row["messages"] for row in kept] == [
        [{"role": "system", "content": "Add."}, *CHAT],
        own,
        [{"role": "system", "content": "Add."}, {"role": "user", "content": "1?"}],
    ]


def test_without_a_chat_template_one_message_is_bare_text_and_more_are_refused(base_model: str) -> None:
    tokenizer = prompts.load_tokenizer(base_model)
    single = [{"role": "system", "content": "Add."}, CHAT[0]]
    assert tokenizer.decode(prompts.encode_prompt(tokenizer, single, "unused")) == "Add.\n\n1 + 1?"
    with pytest.raises(ValueError, match="no chat template, which a conversation of 3 messages needs"):
        prompts.encode_prompt(tokenizer, CHAT, None)


def test_arguments_reach_the_chat_template_and_unknown_ones_are_refused(chat_model: str, base_model: str) -> None:
    tokenizer = prompts.load_tokenizer(chat_model)
    tokenizer.chat_template += "{% if enable_thinking is defined and not enable_thinking %}0{% endif %}"
    usual, without = (prompts.encode_prompt(tokenizer, "1", None, args) for args in ({}, {"enable_thinking": False}))
    assert tokenizer.decode(without) == tokenizer.decode(usual) + "0"
    said = r"^data\.chat_template_args: enable_thinkin is not a variable of its chat template; nearest: enable_thinking"
    with pytest.raises(ValueError, match=said):
        prompts.encode_prompt(tokenizer, "1", None, {"enable_thinkin": False})
    config = DataConfig(chat_template_args={"enable_thinking": False})
    said = r"data\.chat_template_args: enable_thinking is read by nothing: "
    with pytest.raises(ConfigError, match=rf"tokenizer: {said}the tokenizer has no chat template$"):
        prompts.tokenize_rows(rows("1"), config, prompts.TokenizerSource.of(base_model))
    with pytest.raises(ConfigError, match=rf"^{said}{base_model} has no chat template$"):
        prompts.check_template(config.chat_template_args, [], base_model)


@pytest.mark.parametrize(
    ("name", "ending"),
    [
        ("enable_thinking", None),
        ("tools", None),
        ("enable_thinkng", "; nearest: enable_thinking"),
        ("thinking", "; nearest: enable_thinking"),  # a word of its text, and a variable that it sets itself
        ("message", "; there are date, enable_thinking"),
        ("content", "; there are date, enable_thinking"),
    ],
)
def test_an_argument_of_a_chat_template_is_a_variable_that_it_reads(
    name: str, ending: str | None, chat_model: str, tmp_path: Path
) -> None:
    """Whatever transformers' templates are made of, such as {% generation %} and {% break %}."""
    folder = shutil.copytree(chat_model, tmp_path / "model")
    (folder / "chat_template.jinja").write_text(
        "{{ bos_token }}{% set thinking = enable_thinking is defined and enable_thinking %}"
        "{% macro today() %}{{ date or strftime_now('%d') }}{% endmacro %}{{ today() }}{{ tools | length }}"
        "{% for message in messages %}{% if loop.index > 9 %}{% break %}{% endif %}"
        "{% generation %}{{ message.content }}{% endgeneration %}{% endfor %}{{ thinking }}{{ add_generation_prompt }}"
    )
    said = rf"^data\.chat_template_args: {name} is not a variable of the chat template of {folder}{ending}$"
    with pytest.raises(ConfigError, match=said) if ending else nullcontext():
        prompts.check_template({name: []}, [], str(folder))


def test_arguments_of_one_of_several_chat_templates_are_known(chat_model: str, tmp_path: Path) -> None:
    folder = shutil.copytree(chat_model, tmp_path / "model")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ thorough }}")
    prompts.check_template({"thorough": True}, [], str(folder))
    with pytest.raises(ConfigError, match=r"thorogh is not a variable of .*; nearest: thorough$"):
        prompts.check_template({"thorogh": True}, [], str(folder))


def test_what_is_no_chat_template_has_no_variables(chat_model: str, tmp_path: Path) -> None:
    folder = shutil.copytree(chat_model, tmp_path / "model")
    (folder / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(ConfigError, match=rf"^model.path {folder}: its tokenizer: its chat template: Expected an expr"):
        prompts.check_template({"a": 1}, [], str(folder))


def test_over_long_prompts_are_left_out_and_counted(base_model: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="rlx"):
        table = prompts.tokenize_rows(
            rows("ab", LONG, "cd", LONG), DataConfig(max_prompt_tokens=24), prompts.TokenizerSource.of(base_model)
        )
    assert [row["question"] for row in table.take_all()] == ["ab", "cd"]
    assert [row["entry"] for row in table.take_all()] == [0, 2]
    assert caplog.messages == ["2 of 4 prompts are longer than data.max_prompt_tokens (24) and left out"]
    caplog.clear()
    assert (
        prompts.tokenize_rows(
            rows("ab", LONG), DataConfig(max_prompt_tokens=25), prompts.TokenizerSource.of(base_model)
        ).count()
        == 2
    )
    assert caplog.messages == []


def test_no_prompt_left_is_an_error(base_model: str) -> None:
    with pytest.raises(ConfigError, match=r"no prompt is left: 2 of 2 prompts are longer than .*_tokens \(24\)"):
        prompts.tokenize_rows(
            rows(LONG, LONG), DataConfig(max_prompt_tokens=24), prompts.TokenizerSource.of(base_model)
        )


def test_a_prompt_without_a_token_is_refused(base_model: str) -> None:
    with pytest.raises(ConfigError, match=r"its tokenizer: it makes no token of the question ''$"):
        prompts.tokenize_rows(rows("1?", ""), DataConfig(), prompts.TokenizerSource.of(base_model))


@pytest.mark.slow
def test_an_empty_block_has_the_schema_of_the_others(base_model: str) -> None:
    source = ray.data.from_items(rows(LONG, LONG, "ab", "cd"), override_num_blocks=2)
    table = prompts.tokenize_rows(source, DataConfig(max_prompt_tokens=24), prompts.TokenizerSource.of(base_model))
    joined = pa.concat_tables(table.iter_batches(batch_size=None, batch_format="pyarrow"))
    assert joined["question"].to_pylist() == ["ab", "cd"]


def test_a_folder_without_a_tokenizer_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"model.path {tmp_path}: its tokenizer: ") as refused:
        prompts.tokenize_rows(rows("ab"), DataConfig(), prompts.TokenizerSource.of(str(tmp_path)))
    assert "\n" not in str(refused.value)


@pytest.mark.slow
def test_a_batch_of_questions_has_the_tokens_of_each_alone(chat_model: str, base_model: str) -> None:
    questions = ["1 + 1?", "", "a longer question, with more words in it", "7"] * 300  # more than one batch
    for model, system in [(chat_model, None), (chat_model, "Be brief."), (base_model, None), (base_model, "Add.")]:
        tokenizer = prompts.load_tokenizer(model)
        alone = [prompts.encode_prompt(tokenizer, question, system) for question in questions]
        encoder = prompts.PromptEncoder(prompts.TokenizerSource.of(model, False), system)
        assert list(encoder(questions)) == alone
        if system is None and model == base_model:
            assert alone[0] == tokenizer("1 + 1?").input_ids


def test_a_saved_limit_of_length_does_not_cut_a_batch(base_model: str) -> None:
    tokenizer = prompts.load_tokenizer(base_model)
    tokenizer.backend_tokenizer.enable_truncation(3)
    tokenizer.backend_tokenizer.enable_padding()
    assert [len(ids) for ids in prompts.encode_prompts(tokenizer, ["1 + 1?", LONG], None)] == [4, 25]


def test_what_a_tokenizer_does_beside_its_library_is_kept(base_model: str) -> None:
    tokenizer = prompts.load_tokenizer(base_model)

    class Closed(type(tokenizer)):  # type: ignore[misc]
        """Adds a question mark to each text."""

        def __call__(self, text: Any, **kwargs: Any) -> Any:
            return super().__call__(f"{text}?" if isinstance(text, str) else [f"{each}?" for each in text], **kwargs)

    plain = prompts.encode_prompts(tokenizer, ["1?", "22?"], None)
    tokenizer.__class__ = Closed
    assert prompts.encode_prompts(tokenizer, ["1", "22"], None) == plain


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "took longer than 0.5 s"),
        ("{{ 'a' * 3000000000 }}", "took more than 256 MiB"),
        ("{{ 'ab' * 1000000 }}", "makes 2,000,000 characters of a question"),
    ],
)
def test_a_hostile_chat_template_is_stopped(
    template: str, said: str, chat_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts, "_TEMPLATE_S", 0.5)
    monkeypatch.setattr(prompts, "_TEMPLATE_BYTES", 256 << 20)
    tokenizer = prompts.load_tokenizer(chat_model)
    tokenizer.chat_template, template = template, tokenizer.chat_template
    before = (signal.getsignal(signal.SIGALRM), resource.getrlimit(resource.RLIMIT_AS))
    with pytest.raises(ValueError, match=said):
        prompts.encode_prompts(tokenizer, ["1 + 1?"], None)
    assert (signal.getsignal(signal.SIGALRM), resource.getrlimit(resource.RLIMIT_AS)) == before
    tokenizer.chat_template = template
    assert prompts.encode_prompts(tokenizer, ["1 + 1?"], None)


def test_an_error_of_a_chat_template_names_the_model(chat_model: str, tmp_path: Path) -> None:
    folder = shutil.copytree(chat_model, tmp_path / "hostile")
    (folder / "chat_template.jinja").write_text("{{ 'ab' * 1000000 }}")
    with pytest.raises(ConfigError, match=rf"model.path {folder}: its tokenizer: .*makes 2,000,000 characters"):
        prompts.tokenize_rows(rows("1 + 1?"), DataConfig(), prompts.TokenizerSource.of(str(folder)))


@pytest.mark.slow
def test_many_rows_are_tokenized_in_several_blocks_in_their_order(
    base_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts, "_BLOCK_ROWS", 10)
    table = prompts.tokenize_rows(
        rows(*(f"{i} + 1?" for i in range(95))), DataConfig(), prompts.TokenizerSource.of(base_model)
    )
    assert table.num_blocks() == 10
    assert decoded(table, base_model) == [f"{i} + 1?" for i in range(95)]


def test_few_rows_stay_one_block(base_model: str) -> None:
    assert (
        prompts.tokenize_rows(
            rows(*(f"{i} + 1?" for i in range(4096))), DataConfig(), prompts.TokenizerSource.of(base_model)
        ).num_blocks()
        == 1
    )


@pytest.mark.slow
def test_the_files_of_a_tokenizer_travel_without_the_weights(chat_model: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(chat_model, folder)
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "code.py").write_text("pass")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tools.jinja").write_text("x")
    source = prompts.TokenizerSource.of(str(folder), False)
    files = ray.get(source.files)
    assert "model.safetensors" not in files and {"code.py", "additional_chat_templates/tools.jinja"} <= files.keys()
    shutil.rmtree(folder)  # as on another node
    encoder = prompts.PromptEncoder(source, None)
    expected = prompts.encode_prompts(prompts.load_tokenizer(chat_model), ["1 + 1?"], None)
    assert ray.get(ray.remote(num_cpus=0)(lambda: list(encoder(["1 + 1?"]))).remote()) == expected


def test_a_name_on_the_hub_is_looked_up_where_it_is_used() -> None:
    source = prompts.TokenizerSource.of("organization/model", True)
    assert (source.model, source.trust_remote_code, source.files) == ("organization/model", True, None)


@pytest.mark.slow
def test_the_copy_of_a_tokenizer_needs_no_torch_and_no_folder(chat_model: str, tmp_path: Path) -> None:
    """To import them takes seconds in each process."""
    copy = ray.get(prompts.TokenizerSource.of(chat_model).copy)
    (tmp_path / "copy").write_bytes(copy)
    code = """
import json, pickle, sys
from rlx.data import prompts
tokenizer = pickle.load(open("copy", "rb"))
print(json.dumps([prompts.encode_prompts(tokenizer, ["1 + 1?", ""], "Be brief."), "torch" in sys.modules]))
"""
    out = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    expected = prompts.encode_prompts(prompts.load_tokenizer(chat_model), ["1 + 1?", ""], "Be brief.")
    assert json.loads(out) == [expected, False]


def test_a_tokenizer_of_the_models_own_code_is_loaded_in_each_process(
    chat_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its class cannot be found by another process."""
    own = type("OwnTokenizer", (), {"__module__": "transformers_modules.own"})()
    monkeypatch.setattr(prompts, "load_tokenizer", lambda folder, trust_remote_code: own)
    source = prompts.TokenizerSource.of(chat_model, True)
    assert prompts._pickled(replace(source, copy=None, checksum=1)) is None
    without = replace(source, copy=ray.put(None), checksum=2)
    assert prompts._load(without) is own


def test_another_tokenizer_in_the_same_folder_is_another_source(chat_model: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(chat_model, folder)
    before = prompts.TokenizerSource.of(str(folder), False)
    assert prompts.TokenizerSource.of(str(folder), False) == before
    (folder / "tokenizer.json").write_text("{}")
    assert prompts.TokenizerSource.of(str(folder), False) != before


def stored(file: Path, *questions: str) -> dict[str, Any]:
    """A file with these questions as one of data.sources."""
    file.write_text("".join(json.dumps({"question": question, "answer": "1"}) + "\n" for question in questions))
    return {"source": str(file)}


def tables_of(model: str, *several: dict[str, Any], num_prompts: int = 4, **data: Any) -> dict[str, list[str]]:
    """The questions of each table of these data.sources."""
    config = from_tree({"data": {"sources": list(several)} | data, "eval": {"num_prompts": num_prompts}})
    tokenizer = prompts.TokenizerSource.of(model)
    tables = source_tables(config.data, config.eval, [None] * len(several), tokenizer)
    return {name: [row["question"] for row in table.take_all()] for name, table in tables.items()}


@pytest.mark.slow
def test_the_source_whose_prompts_are_too_long_is_named(
    base_model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    short, long = stored(tmp_path / "a.jsonl", "a", "b", "c"), stored(tmp_path / "b.jsonl", LONG, LONG + "?", "d")
    with caplog.at_level(logging.WARNING, logger="rlx"), pytest.raises(ConfigError) as refused:
        tables_of(base_model, short, long, max_prompt_tokens=24)
    told = "are longer than data.max_prompt_tokens (24)"
    place = f"training prompts of data.sources.1.source {tmp_path}/b.jsonl"
    assert str(refused.value) == f"no prompt is left: 2 of 2 {place} {told}"
    own = short | {"name": "own", "held_out": long["source"]}
    with caplog.at_level(logging.WARNING, logger="rlx"):
        tables_of(base_model, short, own, num_prompts=6, max_prompt_tokens=24)
    place = f"held-out prompts of data.sources.1.held_out {tmp_path}/b.jsonl"
    assert f"2 of 3 {place} {told} and left out" in caplog.messages


@pytest.mark.slow
def test_the_source_that_cannot_be_split_is_named(base_model: str, tmp_path: Path) -> None:
    several = stored(tmp_path / "a.jsonl", "a", "b", "c"), stored(tmp_path / "b.jsonl", "d")
    with pytest.raises(
        ConfigError, match=r"^data\.sources\.1\.source: 1 rows are too few .*; set data\.sources\.1\.held_out$"
    ):
        tables_of(base_model, *several)
    several = several[0], stored(tmp_path / "b.jsonl", *"dddd")
    with pytest.raises(ConfigError, match=r"b\.jsonl: every training prompt .*, of one of data\.sources$"):
        tables_of(base_model, *several)


@pytest.mark.slow
@pytest.mark.parametrize("held_out", [None, "held.jsonl"])
def test_a_prompt_that_one_source_holds_out_is_trained_on_through_no_other(
    base_model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, held_out: str | None
) -> None:
    """The first source holds out c, its last row or what its file has; the sums hold out what they generate."""
    made = {"source": "reasoning_gym:chain_sum", "num_prompts": 30}
    (held, *_) = generated_questions(DataConfig(), seed=10_000_000, size=1)
    first, named = stored(tmp_path / "a.jsonl", "a", "b", "c"), {}
    if held_out:
        named = {"held_out": stored(tmp_path / held_out, "c")["source"]}
    second = stored(tmp_path / "b.jsonl", "c", "d", held["question"], "c", "e", "f")
    found = tables_of(base_model, first | named, second, made)
    assert found["held_out.0"] == ["c"] and found["held_out.1"] == ["f"] and held["question"] in found["held_out.2"]
    assert (found["train.0"], found["train.1"]) == (["a", "b"], ["d", "e"])
    told = [line for line in caplog.messages if "also held out" in line]
    of_second = (
        f"data.sources.1.source {tmp_path}/b.jsonl: 3 of 5 training prompts are also held out: they are left out"
    )
    of_first = f"data.sources.0.source {tmp_path}/a.jsonl: 1 of 3 training prompts are also held out: they are left out"
    assert told == ([of_first, of_second] if held_out else [of_second])


@pytest.mark.slow
def test_answers_of_held_out_prompts_are_not_learnt(
    base_model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    address = stored(tmp_path / "a.jsonl", "a", "b", "c", "b")["source"]
    tokenizer, data = prompts.TokenizerSource.of(base_model), DataConfig(source=address, params={})
    held_out = source_tables(data, EvalConfig(num_prompts=1), [None], tokenizer)["held_out"]
    assert [row["question"] for row in held_out.take_all()] == ["b"]
    answers = DataConfig(ptx_source=address)
    assert [row["question"] for row in supervised_table(answers, [held_out], tokenizer).take_all()] == ["a", "c"]
    assert f"data.ptx_source {address}: 2 of 4 training prompts are also held out: they are left out" in caplog.messages
    with pytest.raises(ConfigError, match=r"^data\.ptx_source .*: every training prompt is also a held-out one$"):
        supervised_table(DataConfig(ptx_source=stored(tmp_path / "b.jsonl", "b")["source"]), [held_out], tokenizer)


@pytest.mark.slow
def test_a_prompt_with_another_system_message_is_another_one(chat_model: str, tmp_path: Path) -> None:
    first, second = stored(tmp_path / "a.jsonl", "a", "c"), stored(tmp_path / "b.jsonl", "c", "d", "e")
    assert tables_of(chat_model, first, second | {"system_prompt": "Add."})["train.1"] == ["c", "d"]
    assert tables_of(chat_model, first, second)["train.1"] == ["d"]
    chat = json.dumps([{"role": "user", "content": "c"}])
    second = stored(tmp_path / "b.jsonl", chat, "d", "e")
    assert tables_of(chat_model, first, second)["train.1"] == ["d"]  # c is the same prompt as text and as conversation


def test_a_prompt_that_is_held_out_is_not_trained_on_however_it_is_written(
    chat_model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The policy reads the same of text and a conversation, of one system message and another one's copy."""
    asked = {"role": "user", "content": "q39"}
    brief, other = ([{"role": "system", "content": text}, asked] for text in ("Be brief.", "Add."))
    questions = [other, brief, [asked], *(f"q{i}" for i in (*range(40), *range(40)))]
    file = tmp_path / "p.jsonl"
    file.write_text("".join(json.dumps({"question": each, "answer": "x"}) + "\n" for each in questions))
    data = DataConfig(source=str(file), params={}, system_prompt="Be brief.")
    tables = source_tables(data, EvalConfig(num_prompts=3), [None], prompts.TokenizerSource.of(chat_model))
    found = {name: [row["question"] for row in table.take_all()] for name, table in tables.items()}
    others = [f"q{i}" for i in range(37)]
    assert found == {"held_out": ["q37", "q38", "q39"], "train": ["q39", *others, *others]}
    assert "p.jsonl: 5 of 80 training prompts are also held out: they are left out" in caplog.text


def test_blanks_that_a_template_drops_make_no_other_prompt(chat_model: str, tmp_path: Path) -> None:
    tokenizer = prompts.load_tokenizer(chat_model)
    tokenizer.chat_template = "{% for message in messages %}{{ message.content | trim }}{% endfor %}"
    tokenizer.save_pretrained(tmp_path / "trims")
    address = stored(tmp_path / "p.jsonl", "9 + 9? ", "1?", "9 + 9?")["source"]
    source = prompts.TokenizerSource.of(str(tmp_path / "trims"))
    table = source_tables(DataConfig(source=address, params={}), EvalConfig(), [None], source)["train"]
    assert [row["question"] for row in table.take_all()] == ["1?"]


def test_prompts_that_are_all_held_out_are_refused(base_model: str, tmp_path: Path) -> None:
    data = DataConfig(source=stored(tmp_path / "p.jsonl", *"q" * 30)["source"], params={})
    with pytest.raises(ConfigError, match=r"p\.jsonl: every training prompt is also a held-out one; set eval\.source$"):
        source_tables(data, EvalConfig(num_prompts=3), [None], prompts.TokenizerSource.of(base_model))


def test_prompts_of_a_file_to_evaluate_on_are_not_trained_on(base_model: str, tmp_path: Path) -> None:
    first, second = stored(tmp_path / "a.jsonl", "a", "b", "c"), stored(tmp_path / "b.jsonl", "c", "d", "a")

    def trained(num_prompts: int) -> list[str]:
        data = DataConfig(source=first["source"], params={})
        held_out = EvalConfig(source=second["source"], num_prompts=num_prompts)
        table = source_tables(data, held_out, [None], prompts.TokenizerSource.of(base_model))["train"]
        return [row["question"] for row in table.take_all()]

    assert trained(2) == ["a", "b"] and trained(3) == ["b"]
    stored(tmp_path / "b.jsonl", "c", "b", "a")
    with pytest.raises(
        ConfigError, match=r"^data\.source .*a\.jsonl: every training prompt is also a held-out one, of eval\.source$"
    ):
        trained(3)


@pytest.mark.slow
def test_nothing_of_it_needs_a_free_cpu(base_model: str, tmp_path: Path) -> None:
    """The workers and engines of a run hold all CPUs when its prompts are made."""
    cpus = int(ray.cluster_resources()["CPU"])
    group = placement_group([{"CPU": cpus}])
    assert group.wait(30)
    try:
        path = tmp_path / "p.csv"
        path.write_text("question,answer\n" + "".join(f"{i}?,{i}\n" for i in range(40)))
        data = DataConfig(source=str(path), params={})
        training, held_out = sources.training_and_held_out_rows(data, EvalConfig(num_prompts=3))
        tables = [
            prompts.tokenize_rows(each, data, prompts.TokenizerSource.of(base_model)) for each in (training, held_out)
        ]
        rows = [rows_of(table, small) for table in tables for small in (0, SMALL)]
        assert [len(each) for each in rows] == [37, 37, 3, 3]
        assert [prompt.question for prompt in Share(rows[2]).in_order()] == ["37?", "38?", "39?"]
        several = stored(tmp_path / "a.jsonl", "a", "b"), stored(tmp_path / "b.jsonl", "b", "c", "d")
        assert tables_of(base_model, *several)["train.1"] == ["c"]
    finally:
        remove_placement_group(group)
