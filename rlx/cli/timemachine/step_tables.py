"""Tables of what a step trained on: its prompts, and the tokens of one. Left out: their content (rlx.replay)."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.cli import listing
from rlx.cli.arguments import terminal_width
from rlx.cli.samples import readable
from rlx.replay.inside_step import StepPrompt

_PROMPTS, _CHARACTERS = 10, 60


def prompts_table(prompts: Sequence[StepPrompt]) -> str:
    """A table with a row per prompt, of those with the largest share of the gradient."""
    rows = [
        {
            "prompt": str(each.index),
            "question": end_of(each.completions[0].question),
            "right": f"{each.right}/{len(each.completions)}",
            "score": f"{each.mean_score:.3g}",
            "tokens": str(each.tokens),
            "advantages": _span(each.advantages),
            "ratios": _span(each.ratios),
            "gradient": "" if each.share is None else f"{each.share:.1%}",
        }
        for each in prompts[:_PROMPTS]
    ]
    return listing.markdown_table(rows, terminal_width(), {"prompt", "right", "score", "tokens", "gradient"})


def tokens_table(prompt: StepPrompt) -> str:
    """A table with a row per token of a prompt's completions."""
    rows = [
        {
            "sample": str(row.sample),
            "token": readable(token, _CHARACTERS),
            "log-probability": _at(row.logprobs, place),
            "ratio": _at(row.ratios, place),
            "advantage": _at(row.advantages, place),
        }
        for row in prompt.completions
        for place, token in enumerate(row.tokens)
    ]
    return listing.markdown_table(rows, terminal_width(), {"sample", "log-probability", "ratio", "advantage"})


def end_of(text: str) -> str:
    """The end of a question, in one line: questions of one kind often begin alike."""
    whole = readable(text, None)
    return whole if len(whole) <= _CHARACTERS else f"…{whole[1 - _CHARACTERS :]}"


def _span(values: Sequence[float]) -> str:
    return f"{min(values):.3g} to {max(values):.3g}" if values else ""


def _at(values: Sequence[float] | None, place: int) -> str:
    return "" if values is None else f"{values[place]:.4g}"
