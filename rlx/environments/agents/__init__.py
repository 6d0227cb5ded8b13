"""Agents that other people wrote as environments: they ask an OpenAI-compatible address, and the policy answers.

`loop.AgentLoop` is the class to derive from; `endpoint` is the address that one episode has, `wire` what travels there,
`calls` those of tools in it.
It may import what rlx.environments may, and aiohttp. Left out: the policy's tokens, log-probabilities and masks, which
are those of any episode (rlx.rollout.episodes).

Example:
    import openai

    from rlx.environments.agents import AgentLoop


    class Solver(AgentLoop):
        def play(self, row, seed, base_url, api_key):
            client = openai.OpenAI(base_url=base_url, api_key=api_key)
            messages = [{"role": "user", "content": row.question}]
            said = client.chat.completions.create(model="policy", messages=messages)
            return float(said.choices[0].message.content == row.answer)
"""

from rlx.environments.agents.loop import AgentLoop

__all__ = ["AgentLoop"]
