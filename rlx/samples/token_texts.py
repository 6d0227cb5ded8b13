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
        for token in {token for token in ids if token not in known}:  # `- known.keys()` would look at all of them
            known[token] = self._decode([token])
        texts = [known[token] for token in ids]
        return self._joined(ids, texts) if any(_INCOMPLETE in text for text in texts) else texts

    def _joined(self, ids: Sequence[int], texts: Sequence[str]) -> list[str]:
        result, end = list(texts), 0
        for start in [place for place, text in enumerate(texts) if _INCOMPLETE in text]:
            if start >= end and (size := self._size(ids, start)) > 1:
                result[start : start + size] = [self._decode(ids[start : start + size]), *[""] * (size - 1)]
                end = start + size
        return result

    def _size(self, ids: Sequence[int], start: int) -> int:
        """How many tokens from here on have whole characters together; 1 if none have."""
        most = min(_LONGEST, len(ids) - start)
        sizes = range(2, most + 1)
        return next((n for n in sizes if _INCOMPLETE not in self._decode(ids[start : start + n])), 1)

    def _decode(self, ids: Sequence[int]) -> str:
        text = self.whole([self._anchor, *ids])
        return text.removeprefix(self._anchor_text) if text.startswith(self._anchor_text) else self.whole(ids)
