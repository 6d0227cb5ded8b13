"""Episodes: completions that a policy and an environment make in turn, token by token as the policy drew them.

`dialogue` writes messages as tokens that follow what was drawn, `episode` is one episode while it is played, `player`
plays all of a rank at once, `draws` asks a rank's engines for turns, `kept` answers for environments in steps that are
done again. Left out: environments (rlx.environments), and what an episode is trained with (rlx.training).

Seeds follow from (run seed, step, prompt, sample, turn), and what an environment has said is kept with the completion.

Example:
    from rlx.environments.host import HostSettings
    from rlx.environments.pool import EnvironmentPool, LocalHost
    from rlx.data.prompts import load_tokenizer
    from rlx.rollout.episodes.dialogue import Dialogue
    from rlx.rollout.episodes.episode import EpisodeLimits
    from rlx.rollout.episodes.player import Player
    from rlx.rollout.fake_engine import FakeEngines

    hosts = [LocalHost(HostSettings("guess_number", {"largest": 7}, timeout_s=5.0, concurrency=8))]
    environments = EnvironmentPool(hosts, "example/", retries=1, concurrency=8, notify=print)
    written = Dialogue(load_tokenizer("storage/models/mine"))
    engines = FakeEngines(play=lambda draw: Player(draw, environments, written, EpisodeLimits(max_turns=3), run_seed=0))
"""
