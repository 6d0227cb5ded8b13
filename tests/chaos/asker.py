"""An agent of its own, for the runs of test_killed_episodes.py: it asks at most three times for a number."""

import openai

from rlx.environments.agents import AgentLoop
from rlx.types import TaskRow


class Asker(AgentLoop):
    """Says whether an answer is too small or too large, until it is within 100 of the right one."""

    async def play(self, row: TaskRow, seed: int, base_url: str, api_key: str) -> float:
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            messages = [{"role": "user", "content": row.question}]
            for asked in range(3):
                said = await client.chat.completions.create(model="policy", messages=messages)  # type: ignore[arg-type]
                text = said.choices[0].message.content or ""
                digits = text.strip().lstrip("-")
                if digits.isascii() and digits.isdecimal():
                    away = int(text) - int(row.answer)
                    if abs(away) <= 100:
                        return 1.0 - 0.1 * asked
                    told = "smaller" if away > 0 else "larger"
                else:
                    told = "a number"
                messages += [{"role": "assistant", "content": text}, {"role": "user", "content": told}]
        return 0.0
