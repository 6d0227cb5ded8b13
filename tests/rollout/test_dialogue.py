"""Tokens of conversations over the chat templates of real model families, as TRL's package has them.

What the policy draws is extended by what the environment says. The tokens are exactly those of the whole conversation
rendered at once, or, where a template changes earlier turns, a new context begins, which is that.
"""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from episode_cases import CHATML, byte_tokenizer

from rlx.config.errors import ConfigError
from rlx.config.sections.data import DataConfig
from rlx.config.sections.rollout import EnvironmentConfig
from rlx.environments.calculator import Calculator
from rlx.environments.tools import calls_in, schemas
from rlx.rollout.episodes.dialogue import Dialogue, Written
from rlx.runs.worker import dialogue_of
from rlx.types import Utterance

_FOUND = importlib.util.find_spec("trl")
TEMPLATES = Path(_FOUND.submodule_search_locations[0] if _FOUND and _FOUND.submodule_search_locations else "") / (
    "chat_templates"
)
needs_templates = pytest.mark.skipif(_FOUND is None, reason="TRL, which has the templates, is not installed")
_IM = ("<|im_end|>", "<|im_start|>", "<|endoftext|>")
_DEEPSEEK = ("<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>")  # noqa: RUF001
SPECIAL = {
    "qwen2_5": _IM,
    "qwen3": _IM,
    "qwen3_instruct_2507": _IM,
    "qwen3_5_think": _IM,
    "lfm2": _IM,
    "llama3_1": ("<|eot_id|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
    "gemma3": ("<end_of_turn>", "<bos>", "<start_of_turn>"),
    "deepseek_r1_distill": _DEEPSEEK,
    "phi3_5": ("<|end|>", "<|user|>", "<|assistant|>", "<|system|>"),
    "llama3_2": ("<|eot_id|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
    "glm4moe": ("<|user|>", "[gMASK]", "<sop>", "<|assistant|>", "<|system|>", "<|observation|>"),
}
"""special tokens of families, where they are not Qwen's or LFM's; the first ends a turn"""
PLAIN, THOUGHT = "I look.\n\nHm", "<think>\nso\n</think>\n\nIt is 4"
CALL = '<tool_call>\n{"name": "calculate", "arguments": {"expression": "2 + 2"}}\n</tool_call>'
TEXTS = [path.read_text() for path in sorted(TEMPLATES.glob("*.jinja"))] if _FOUND else []


def tokenizer_of(family: str) -> Any:
    """A tokenizer of bytes and of 300 frequent pieces, with the family's special tokens and its template."""
    special = SPECIAL.get(family, (*_IM, "<|tool_call_start|>", "<|tool_call_end|>"))
    made = byte_tokenizer((TEMPLATES / f"{family}.jinja").read_text(), special, TEXTS)
    made.bos_token = special[1] if "begin" in special[1] or special[1] in ("<bos>", "[gMASK]") else None
    return made


def conversed(
    tokenizer: Any, turns: list[str], role: str, *, extends: bool = False, tools: bool = False
) -> tuple[list[int], list[bool], list[int]]:
    """The tokens that the policy reads last, whether each turn began a new context, and the whole rendered at once."""
    described = schemas(Calculator) if tools else ()
    dialogue = Dialogue(tokenizer, described, extends=extends)
    history: list[Utterance] = [{"role": "user", "content": "What is 2 + 2?"}]
    written: Written = dialogue.opening(history)
    ids, begun = list(written.token_ids), []
    for number, text in enumerate(turns):
        drawn = [*tokenizer(text, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
        said: list[Utterance] = [{"role": role, "name": "calculate", "content": f"value {number}\n"}]
        history.append({"role": "assistant", "content": dialogue.decode(drawn)})
        written = dialogue.continuation(written.text, history, drawn, True, said)
        begun.append(written.is_new_context)
        ids = list(written.token_ids) if written.is_new_context else [*ids, *drawn, *written.token_ids]
        history += said
    given = {"tools": described} if tools else {}
    chat = [dict(message) for message in history]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True, **given)
    return ids, begun, tokenizer(text, add_special_tokens=False).input_ids


@needs_templates
@pytest.mark.parametrize(
    ("family", "role", "turns", "begun"),
    [
        ("qwen2_5", "user", [PLAIN, THOUGHT, "done"], [False, False, False]),
        ("qwen2_5", "tool", [CALL, PLAIN + CALL, "done"], [False, False, False]),
        ("qwen3", "tool", [CALL, THOUGHT + CALL, "done"], [False, False, False]),
        ("qwen3", "user", [PLAIN, THOUGHT, "done"], [False, True, False]),  # thoughts go when the user speaks again
        ("qwen3_instruct_2507", "tool", [CALL, PLAIN, "done"], [False, False, False]),
        ("qwen3_5_think", "user", ["so\n</think>\n\nI look."] * 2, [True, True]),
        ("lfm2", "tool", [PLAIN, PLAIN], [False, False]),
        ("llama3_1", "user", [PLAIN, THOUGHT, "done"], [False, False, False]),
        ("llama3_1", "tool", [PLAIN, '{"name": "calculate", "parameters": {}}'], [False, False]),
        ("gemma3", "user", [PLAIN, THOUGHT, "done"], [False, False, False]),
        ("deepseek_r1_distill", "user", ["so\n</think>\n\nI look."] * 2, [True, True]),
        ("phi3_5", "user", [PLAIN, THOUGHT], [False, False]),
        ("glm4moe", "user", ["\n<think>so</think>\nIt is"] * 2, [True, True]),
    ],
)
def test_tokens_are_those_of_the_whole_conversation(
    family: str, role: str, turns: list[str], begun: list[bool]
) -> None:
    ids, found, whole = conversed(tokenizer_of(family), turns, role, tools=role == "tool")
    assert (found, ids) == (begun, whole)


@needs_templates
@pytest.mark.parametrize("family", ["qwen3", "deepseek_r1_distill"])
def test_history_can_be_extended_instead_thoughts_and_all(family: str) -> None:
    tokenizer = tokenizer_of(family)
    ids, begun, whole = conversed(tokenizer, ["<think>\nhm\n</think>\n\nA", "B"], "user", extends=True)
    assert begun == [False, False] and ids != whole
    assert "hm\n</think>\n\nA" in tokenizer.decode(ids) and "hm" not in tokenizer.decode(whole)


def test_a_turn_that_was_cut_is_ended_as_the_template_ends_turns() -> None:
    tokenizer = byte_tokenizer(CHATML)
    dialogue = Dialogue(tokenizer)
    history: list[Utterance] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "bc"}]
    said: list[Utterance] = [{"role": "user", "content": "d"}]
    read = dialogue.opening(history[:1]).text
    cut = dialogue.continuation(read, history, tokenizer("bc").input_ids, False, said)
    assert tokenizer.decode(cut.token_ids) == "<|end|>\n<|user|>d<|end|>\n<|assistant|>"
    whole = dialogue.continuation(read, history, [*tokenizer("bc").input_ids, 0], True, said)
    assert tokenizer.decode(whole.token_ids) == "\n<|user|>d<|end|>\n<|assistant|>"


@pytest.mark.parametrize(
    ("template", "tools", "reason"),
    [
        (None, False, "has no chat template"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", True, "does not show tools"),
        ("{{ raise_exception('no roles') }}", False, "does not take turns: no roles"),
        ("{{ messages[0].content }}", False, "does not take turns: it leaves out what the assistant says"),
        (
            "{% if messages[2:] %}{{ raise_exception('no call') }}{% endif %}",
            True,
            "not take a tool's answer .*: no call",
        ),
        ("{{ raise_exception('no roles') }}", True, "does not take turns: no roles"),
    ],
)
def test_a_template_that_cannot_be_used_is_refused(template: str | None, tools: bool, reason: str) -> None:
    tokenizer = byte_tokenizer(template or "")
    with pytest.raises(ConfigError, match=reason) as raised:
        Dialogue(tokenizer, schemas(Calculator) if tools else ())
    assert "\n" not in str(raised.value)


@needs_templates
@pytest.mark.parametrize("family", ["gptoss", "cohere"])
def test_a_template_that_wants_more_of_a_tool_is_told_apart(family: str) -> None:
    tokenizer = byte_tokenizer((TEMPLATES / f"{family}.jinja").read_text())
    with pytest.raises(ConfigError, match=r"does not take a tool's answer \(role tool, name, content\)"):
        Dialogue(tokenizer, schemas(Calculator))


def test_the_tokenizer_does_not_warn_of_a_text_that_no_model_reads() -> None:
    tokenizer = byte_tokenizer(CHATML)
    tokenizer.model_max_length = 5
    dialogue, history = Dialogue(tokenizer), [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    read = dialogue.opening(history[:1]).text
    long = dialogue.continuation(read, history, (1,), False, [{"role": "user", "content": "c" * 9}])
    assert len(long.token_ids) > 5 and not tokenizer.deprecation_warnings  # where it remembers what it has warned of


@needs_templates
@pytest.mark.parametrize(
    "family",
    [
        *("qwen2_5", "qwen3", "qwen3_instruct_2507", "qwen3_vl", "llama3_1", "llama3_2"),
        *("qwen3_5_nothink", "qwen3_5_think", "qwen3_6", "qwen3_8", "glm4moe"),
        *("nemotron_3_nano", "nemotron_3_super", "nemotron_3_ultra", "nemotron_3_5_lightning"),
        *("lfm2_v2", "lfm2_2_5", "lfm2_2_5_v2", "lfm2_2_5_vl"),
    ],
)
def test_calls_are_read_as_the_template_writes_them(family: str) -> None:
    arguments = {"a": 'x "y" <b> [1]', "bc": "2"}
    dialogue = dialogue_of(EnvironmentConfig(name="calculator"), DataConfig(), tokenizer_of(family))
    found = calls_in("I look.\n</think>\n\n" + dialogue.call_text("calculate", arguments))
    assert [(call.name, call.arguments, call.problem) for call in found] == [("calculate", arguments, "")]


@needs_templates
@pytest.mark.parametrize(
    ("family", "call"),
    [
        *[(f"gemma4{version}", "call:calculate{text:") for version in ("", "_v2", "_v3", "_v4", "_v5")],
        ("diffusion_gemma", "call:calculate{text:"),
        ("muse_glimmer", 'invoke name="calculate"'),
    ],
)
def test_a_template_whose_calls_are_not_read_is_refused(family: str, call: str) -> None:
    with pytest.raises(ConfigError, match=r"template writes calls as .*, which rlx does not read: use a") as raised:
        dialogue_of(EnvironmentConfig(name="calculator"), DataConfig(), tokenizer_of(family))
    assert call in str(raised.value) and "\n" not in str(raised.value) and len(str(raised.value)) < 500


@needs_templates
def test_a_template_that_leaves_calls_out_of_turns_is_taken() -> None:
    dialogue = dialogue_of(EnvironmentConfig(name="calculator"), DataConfig(), tokenizer_of("lfm2"))
    assert "calculate" not in dialogue.call_text("calculate", {})


def test_a_template_that_takes_no_calls_is_refused() -> None:
    refusing = CHATML.replace(
        "<|{{ message.role", "{{ raise_exception('no call') if message.tool_calls }}<|{{ message.role"
    )
    with pytest.raises(ConfigError, match=r"does not take a call \(tool_calls\): no call"):
        dialogue_of(EnvironmentConfig(name="calculator"), DataConfig(), byte_tokenizer(refusing))
