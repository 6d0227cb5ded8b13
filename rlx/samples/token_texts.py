"""The text of each token of a completion, so that a reader needs no tokenizer.

Left out: the text of a whole completion as reward functions see it, which training has already.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_INCOMPLETE = "\ufffd"  # what a tokenizer gives for a part of a character's bytes
_LONGEST = 4  # bytes of a character in UTF-8


class TokenTexts:
    """Texts of tokens, each of which is asked for once.

    Args:
        tokenizer: of the model. It must belong to the calling thread alone: some calls of fast tokenizers exclude
            others.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        # At the start of a text some tokenizers leave a space out, so a token is decoded after another one.
        self._anchor = tokenizer.encode("a", add_special_tokens=False)[-1]
        self._anchor_text = self.whole([self._anchor])
        self._texts: dict[int, str] = {}

    def whole(self, ids: Sequence[int]) -> str:
        """The text of all tokens together, special tokens included."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def each(self, ids: Sequence[int]) -> list[str]:
        """The text of each token. Of tokens that share a character, the first has its text and the others have none."""
        known = self._texts
        for token in set(ids) - known.keys():
            known[token] = self._decode([token])
        texts = [known[token] for token in ids]
        return self._joined(ids, texts) if any(_INCOMPLETE in text for text in texts) else texts

    def _joined(self, ids: Sequence[int], texts: Sequence[str]) -> list[str]:
        result, start = list[str](), 0
        while start < len(ids):
            size = next((n for n in range(1, _LONGEST + 1) if self._is_whole(ids, texts, start, n)), 1)
            text = texts[start] if size == 1 else self._decode(ids[start : start + size])
            result += [text, *[""] * (size - 1)]
            start += size
        return result

    def _is_whole(self, ids: Sequence[int], texts: Sequence[str], start: int, size: int) -> bool:
        """Whether the text of so many tokens has no part of a character."""
        if size == 1:
            return _INCOMPLETE not in texts[start]
        return start + size <= len(ids) and _INCOMPLETE not in self._decode(ids[start : start + size])

    def _decode(self, ids: Sequence[int]) -> str:
        text = self.whole([self._anchor, *ids])
        return text.removeprefix(self._anchor_text) if text.startswith(self._anchor_text) else self.whole(ids)
