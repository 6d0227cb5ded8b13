"""Messages as tokens, without rendering again what the policy has drawn.

The first messages are rendered whole. From then on the tokens of the policy stay as it drew them, and what the
environment says is appended as the chat template writes it after a turn of the assistant. Some templates also change
earlier turns then, such as those that take out old thoughts: by default a new context begins there, which is rendered
whole. White space that a template trims is no change. Left out: who speaks when (episode).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from rlx.config.errors import ConfigError, one_line
from rlx.types import EnvironmentFailed, Utterance

_MARK = "\u2042rlx\u2042"
"""stands for a turn of the policy where only the text after it is looked at"""


@dataclass(frozen=True)
class Written:
    """Messages as the policy reads them."""

    text: str  # of all that it reads: with what it has drawn so far, as the template writes it
    token_ids: tuple[int, ...]  # that follow what it has drawn, or all if a new context begins
    is_new_context: bool = False


@dataclass
class Dialogue:
    """Writes the messages of episodes as tokens of one model. It belongs to one thread."""

    tokenizer: Any
    tools: Sequence[Mapping[str, Any]] = ()  # as JSON schemas
    template_args: Mapping[str, Any] = field(default_factory=dict)
    extends: bool = False  # no new context begins: earlier turns stay as they were drawn, whatever the template says
    check: Callable[[str, Callable[[str, Mapping[str, Any] | str], str]], None] | None = None
    """(name of a tool, `call_text`) raises ConfigError if the calls that the template writes are not read"""
    _offered: Dialogue | None = field(default=None, init=False)  # the last of `with_tools`

    def __post_init__(self) -> None:
        """Raises ConfigError if the tokenizer has no chat template, or one that cannot be used for turns or tools."""
        if not self.tokenizer.chat_template:
            raise ConfigError("environment: the model's tokenizer has no chat template, which turns need")
        opening: list[Utterance] = [{"role": "user", "content": "a"}]
        what = "turns"
        try:
            shown = self._text(opening, ask=True)
            what = "a tool's answer (role tool, name, content)" if self.tools else what
            self._after_policy(opening, [{"role": "tool" if self.tools else "user", "name": "b", "content": "c"}])
        except Exception as error:
            raise ConfigError(
                f"environment: the model's chat template does not take {what}: {one_line(error)}"
            ) from None
        name = str(self.tools[0]["function"]["name"]) if self.tools else ""
        if name not in shown:
            raise ConfigError(
                "environment: the model's chat template does not show tools, so that the model would not know of "
                f"{name}: use a model whose template does, or describe tools in the messages"
            )
        if self.check:
            for tool in self.tools:
                self.check(str(tool["function"]["name"]), self.call_text)

    def with_tools(self, tools: Sequence[Mapping[str, Any]]) -> Dialogue:
        """The same with the tools that an agent offers, if any; raises ConfigError as the constructor."""
        if not tools:
            return self
        # Compared as they are written: templates show the order of keys, and 1 is not True there.
        if self._offered is None or json.dumps(self._offered.tools) != json.dumps(tools):
            self._offered = replace(self, tools=tools)
        return self._offered

    def opening(self, messages: Sequence[Utterance]) -> Written:
        """The first messages, up to where the policy begins; raises EnvironmentFailed as `continuation`."""
        with _refusals(messages):
            text = self._text(messages, ask=True)
            return Written(text, self._ids(text), is_new_context=True)

    def decode(self, generated: Sequence[int]) -> str:
        """The text of a turn of the policy, without special tokens."""
        return str(self.tokenizer.decode(list(generated), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def call_text(self, name: str, arguments: Mapping[str, Any] | str) -> str:
        """A turn of the policy that calls a tool, as the template writes it and `decode` gives it.

        Args:
            arguments: by their names, or as JSON in a text.

        Raises:
            ConfigError: the template does not take a message with `tool_calls`.
        """
        opening: list[Utterance] = [{"role": "user", "content": "a"}]
        function = {"name": name, "arguments": arguments if isinstance(arguments, str) else dict(arguments)}
        call = {"id": "000000000", "type": "function", "function": function}  # nine characters: Mistral's want that
        try:
            calling = self._text([*opening, {"role": "assistant", "content": "", "tool_calls": [call]}], ask=False)
        except Exception as error:
            raise ConfigError(
                f"environment: the model's chat template does not take a call (tool_calls): {one_line(error)}"
            ) from None
        before = self._text([*opening, {"role": "assistant", "content": _MARK}], ask=False).partition(_MARK)[0]
        same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(calling, before, strict=False))
        return self.decode(self._ids(calling[len(list(same)) :]))

    def continuation(
        self,
        read: str,
        history: Sequence[Utterance],
        generated: Sequence[int],
        is_stopped: bool,
        observed: Sequence[Utterance],
    ) -> Written:
        """What comes between a turn of the policy and its next one.

        Args:
            read: the text of what it has read, `Written.text`.
            history: all messages so far; the last one is the policy's.
            generated: the tokens of that one.
            is_stopped: whether their last is a stop token, with which the policy has ended its turn.
            observed: what the environment answers.

        Raises:
            EnvironmentFailed: the chat template or the tokenizer does not take that.
        """
        with _refusals(observed):
            known = read + history[-1]["content"]
            if not self.extends:
                whole = self._text([*history, *observed], ask=True)
                if not _squeezed(whole).startswith(_squeezed(known)):
                    return Written(whole, self._ids(whole), is_new_context=True)
            opening = history[: next(i for i, each in enumerate(history) if each["role"] == "assistant")]
            tail = self._after_policy(opening, observed)
            end, after = (self._stop_text(generated[-1]) if is_stopped else ""), tail.lstrip()
            has_end = bool(end) and after.startswith(end)  # the policy has generated that itself
            return Written(known + tail, self._ids_after(after[len(end) :] if has_end else tail))

    def _after_policy(self, opening: Sequence[Utterance], observed: Sequence[Utterance]) -> str:
        """The text that the template writes after the content of a turn of the policy."""
        marked = self._text([*opening, {"role": "assistant", "content": _MARK}, *observed], ask=True)
        _, mark, tail = marked.rpartition(_MARK)
        if not mark:
            raise ValueError("it leaves out what the assistant says")
        return tail

    def _text(self, messages: Sequence[Mapping[str, object]], *, ask: bool) -> str:
        chat = [dict(message) for message in messages]
        tools = {"tools": list(self.tools)} if self.tools else {}
        return str(
            self.tokenizer.apply_chat_template(
                chat, tokenize=False, add_generation_prompt=ask, **tools, **self.template_args
            )
        )

    def _ids(self, text: str) -> tuple[int, ...]:
        # Else it warns that a long text does not fit in the model: one without room ends the episode instead.
        return tuple(self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids)

    def _ids_after(self, text: str) -> tuple[int, ...]:
        """The tokens of a text that follows a special token: some tokenizers put a space before the first of a text."""
        anchor = self.tokenizer.eos_token
        ids = self._ids(anchor + text)
        return ids[1:] if ids[0] == self.tokenizer.eos_token_id else self._ids(text)

    def _stop_text(self, token: int) -> str:
        return str(self.tokenizer.decode([token], skip_special_tokens=False)).strip()


@contextmanager
def _refusals(messages: Sequence[Utterance]) -> Iterator[None]:
    """Turns what the template (a program) or the tokenizer raises on an environment's messages into its failure."""
    try:
        yield
    except Exception as error:
        roles = ", ".join(str(message["role"]) for message in messages)
        failure = f"the chat template does not take its messages ({roles}): {one_line(error, 200)}"
        raise EnvironmentFailed(failure) from None


def _squeezed(text: str) -> str:
    """A text without white space, which templates trim."""
    return "".join(text.split())
