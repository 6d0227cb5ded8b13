"""Whole runs with what the default run does not use: all that steadies training, adapters and many rewards.

The first ones have the shape of the runs of test_run, and share their engines and workers.
"""

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from run_cases import STEPS, Done, comparable, sample_rows, small, train
from shared import KEPT, NothingLeft
from test_steadying import STEADY
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from rlx.config.run import RunConfig
from rlx.runs import launch, preflight
from rlx.runs.train_run import RunError
from rlx.samples import evaluations
from rlx.samples.evaluations import EvaluationFile
from rlx.storage import checkpoint_catalog, checkpoint_files
from rlx.storage.addresses import open_storage


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory, empty_database: Path) -> Path:
    folder = tmp_path_factory.mktemp("storage")
    shutil.copy(empty_database, folder)
    return folder


@pytest.fixture(scope="module")
def half(nothing_left: NothingLeft, tiny_model: Path, storage: Path) -> Done:
    return train(small(tiny_model, storage, "halves", train__steps=STEPS // 2, **STEADY))


@pytest.fixture(scope="module")
def steady(half: Done, tiny_model: Path, storage: Path) -> Done:
    return train(small(tiny_model, storage, "steady", **STEADY))


@pytest.fixture(scope="module")
def resumed(half: Done, steady: Done, tiny_model: Path, storage: Path) -> Done:
    """The rest of the first half. The same workers have done another run meanwhile: nothing of its state is in them."""
    return train(small(tiny_model, storage, "halves", **STEADY), resume=True)


@pytest.fixture(scope="module")
def remax(nothing_left: NothingLeft, tiny_model: Path, storage: Path) -> Done:
    """One step."""
    chosen = {"algorithm__advantage": "remax", "algorithm__policy_loss": "cispo", "train__steps": 1}
    return train(small(tiny_model, storage, "remax", **chosen))


@pytest.mark.slow  # workers of its own
def test_what_workers_warn_of_is_shown(nothing_left: NothingLeft, tiny_model: Path, storage: Path) -> None:
    name, notes = "tests.my_rewards:slow", list[str]()
    rewards = {"reward__functions": {name: 1.0}, "reward__timeout_s": 1.0, "reward__on_timeout": "zero"}
    done = train(
        small(tiny_model, storage, "warned", train__steps=1, eval__every=0, eval__num_prompts=8, **rewards),
        notify=lambda note: notes.append(str(note)),
    )
    shown = [note for note in notes if f"reward {name}: took longer than 1 s: 0 for 8 responses" in note]
    assert {note.partition(":")[0] for note in shown} == {"worker 0", "worker 1"}
    assert max(note.count("further ones like this are not shown") for note in shown) <= 1
    assert last(done, f"reward/{name}_late", 1) == 1


def last(done: Done, metric: str, step: int) -> float:
    (value,) = done.history[metric][step]
    return value


@pytest.mark.slow  # runs of their own; test_steadying has them without Ray and engines
def test_the_policy_stays_while_the_critic_warms_up(steady: Done) -> None:
    assert 1 not in steady.history["policy/loss"] and 1 in steady.history["value/loss"]
    assert abs(last(steady, "kl/ref", 2)) <= 1e-9 < abs(last(steady, "kl/ref", 3))


@pytest.mark.slow  # the same runs
def test_epochs_end_early_by_kl(steady: Done) -> None:
    assert [last(steady, "policy/updates", step) for step in (2, 3, 4)] == [1, 1, 1]  # of four


@pytest.mark.slow  # the same runs
def test_the_average_is_evaluated_beside_the_policy(steady: Done) -> None:
    assert last(steady, "eval/ema/accuracy", 0) == last(steady, "eval/accuracy", 0)
    assert set(steady.history["eval/ema/reward"]) == {0, 2, 4}
    assert all(last(steady, "mismatch/max_abs", step) <= 1e-4 for step in range(1, 5))  # the policy is back


@pytest.mark.slow  # the same runs
def test_penalties_are_taken_off_and_scores_normalised(steady: Done) -> None:
    taken = last(steady, "reward/task", 1) - last(steady, "reward/mean", 1)
    assert taken >= 0.5 * last(steady, "response/truncated_fraction", 1)
    assert last(steady, "reward/running_mean", 1) == pytest.approx(last(steady, "reward/mean", 1), abs=1e-6)
    assert last(steady, "reward/running_std", 1) > 0


@pytest.mark.slow  # the same runs
def test_a_resumed_run_with_all_that_state_is_the_undisturbed_one(steady: Done, resumed: Done) -> None:
    assert comparable(resumed.history, range(5)) == comparable(steady.history, range(5))
    assert len(comparable(steady.history, range(5))) > 30


@pytest.mark.slow  # a run of its own; test_experience has the greedy completions, test_advantages the formula
def test_remax_compares_with_the_greedy_completion(remax: Done) -> None:
    trained = 16 * last(remax, "response/length_mean", 1)
    assert last(remax, "tokens/total", 1) > trained + 8 - 1e-3  # a greedy completion for each of 8 prompts
    assert last(remax, "mismatch/max_abs", 1) <= 1e-4


@pytest.mark.slow  # engines and workers of their own; test_engine compares the distributions by numbers
def test_the_doctor_proves_the_distribution_that_sampling_options_make(
    nothing_left: NothingLeft, tiny_model: Path, storage: Path
) -> None:
    options = {"min_p": 0.02, "repetition_penalty": 1.2, "bad_words": ["7"], "stop": ["1", "<|end|>"], "min_tokens": 2}
    chosen = {f"rollout__{name}": value for name, value in options.items()}
    config = small(tiny_model, storage, "options", algorithm__rollout_correction="tis", **chosen)
    lines = {line.what: line for line in launch.examine(preflight.prepare(config), KEPT)}
    assert [line for line in lines.values() if not line.passed] == []
    assert lines["engine against trainer, mean difference of logprobs"].figure < 1e-4


@pytest.mark.slow  # workers of its own; test_loop mixes sources on any number of ranks, test_mixture their order
def test_a_run_mixes_a_data_set_on_disk_with_generated_prompts(
    nothing_left: NothingLeft, tiny_model: Path, storage: Path, tmp_path: Path
) -> None:
    rows = [{"role": "user", "content": f"{i} + {i} ="} for i in range(40)]
    file = tmp_path / "doubles.jsonl"
    file.write_text("".join(json.dumps({"q": [row], "a": {"b": 2 * i}}) + "\n" for i, row in enumerate(rows)))
    mixed = [
        {"source": str(file), "prompt_column": "q", "answer_column": "a.b", "reward": {"exact_match": 2.0}},
        {"source": "reasoning_gym:chain_sum", "name": "sums", "weight": 3, "num_prompts": 50},
    ]
    functions, sets = {"task": 1.0, "exact_match": 0.0}, [{"name": "held", "samples": 2}]
    sets.append(
        {"name": "more", "samples": 3, "num_prompts": 5, "source": "reasoning_gym:chain_sum", "seed": 7_000_000}
    )
    overrides = {"data__sources": mixed, "reward__functions": functions, "eval__sets": sets}
    done = train(small(tiny_model, storage, "mixed", train__steps=1, **overrides))
    for name in ("reward/mean", "task/accuracy", "eval/accuracy", "eval/reward"):
        assert last(done, f"{name}/sums", 1 - name.startswith("eval/")) <= 1
    assert last(done, "eval/reward/doubles", 0) == 2 * last(done, "eval/accuracy/doubles", 0)
    assert sample_rows(done, 0)[0]["prompt"] in {f"{i} + {i} =" for i in range(36, 40)}
    run = open_storage(str(storage)) / "runs" / "mixed"
    for name, questions, samples in (("held", 10, 2), ("more", 5, 3)):
        outcomes = evaluations.read_outcomes(run, EvaluationFile(1, name))
        assert outcomes.right.shape == (questions, samples)
        assert last(done, f"eval/{name}/avg_at_{samples}", 1) == pytest.approx(outcomes.right.mean(), abs=1e-6)
        assert last(done, f"eval/{name}/pass_at_{samples}", 1) == pytest.approx(outcomes.right.any(1).mean(), abs=1e-6)


# ---------------------------------------------------------------------------------------------------------------------
# Adapters and many rewards: other engines, and reward models


@pytest.fixture(scope="module")
def judge(tiny_model: Path) -> Path:
    """A reward model: the tiny model with a random layer that scores."""
    folder = tiny_model.with_name("judge")
    torch.manual_seed(0)
    classifier = AutoModelForSequenceClassification.from_pretrained(tiny_model, num_labels=1)
    classifier.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder)
    return folder


class Faulty(ThreadingHTTPServer):
    """Scores by length. Its first answers are a server error, garbage, one score too few, a slow one."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.lock, self.asked, self.spoilt = threading.Lock(), 0, False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/score"


class Answer(BaseHTTPRequestHandler):
    server: Faulty

    def do_POST(self) -> None:
        batch = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            turn, self.server.asked = self.server.asked, self.server.asked + 1
        scores: list[float | None] = [len(completion) / 10 for completion in batch["completions"]]
        bodies = [b"oops", b'{"scores": [', json.dumps({"scores": scores[1:]}).encode()]
        if turn == 3:
            time.sleep(2)
        if self.server.spoilt:
            scores[-1] = None
        body = bodies[turn] if turn < 3 else json.dumps({"scores": scores}).encode()
        self.send_response(500 if turn == 0 else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def server() -> Iterator[Faulty]:
    with Faulty() as faulty:
        threading.Thread(target=faulty.serve_forever, daemon=True).start()
        yield faulty
        faulty.shutdown()


WEIGHTS = {"task": 1.0, "format": 0.2, "length": 0.5, "model": 0.1, "url": -0.3, "tests.my_rewards:short": 0.0}


@pytest.fixture(scope="module")
def many_rewards(tiny_model: Path, storage: Path, judge: Path, server: Faulty) -> Callable[..., RunConfig]:
    """Gives the config of a run by its name, and changes to it. It learns the answers of a file, too."""
    answers = storage / "answers.jsonl"
    rows = [{"question": f"{a}+{a}=", "answer": str(2 * a)} for a in range(1, 20)]
    answers.write_text("\n".join(json.dumps(row) for row in rows))
    chosen: dict[str, Any] = {
        "reward__functions": WEIGHTS,
        "reward__format_pattern": r"\d+",
        "reward__length_target": 3,
        "reward__model": str(judge),
        "reward__url": server.url,
        "train__steps": 2,
        "algorithm__advantage": "grpo",
        "algorithm__filter_groups": True,
        "algorithm__filter_rounds": 2,
        "algorithm__kl_coef": 0.05,
        "algorithm__ptx_coef": 0.5,
        "data__ptx_source": str(answers),
        "data__ptx_batch": 4,
        "model__lora_rank": 4,
        "model__lora_sync": "adapter",
        "train__actor_lr": 5e-3,
        "scaling__num_workers": 1,
        "rollout__num_engines": 1,
    }
    return lambda name, **changes: small(tiny_model, storage, name, **(chosen | changes))


@pytest.fixture(scope="module")
def adapted(nothing_left: NothingLeft, many_rewards: Callable[..., RunConfig]) -> Done:
    return train(many_rewards("adapted"))


@pytest.mark.slow  # engines and workers of their own
def test_engines_agree_after_adapters_were_sent(adapted: Done) -> None:
    assert all(0 < last(adapted, "mismatch/max_abs", step) <= 1e-4 for step in (1, 2))
    assert abs(last(adapted, "kl/ref", 1)) <= 1e-9
    assert last(adapted, "kl/ref", 2) > 1e-6  # the adapters have moved, and the policy without them has not


@pytest.mark.slow  # engines and workers of their own
def test_only_adapters_are_kept_in_checkpoints(adapted: Done) -> None:
    found = checkpoint_catalog.read_checkpoint(open_storage(f"{adapted.result.folder}/step_000002"))
    with checkpoint_files.CheckpointReader(found.files) as parts:
        names = parts.names
    weights = [name for name in names if name.startswith("policy.model.")]
    assert weights and all(".lora_" in name for name in weights)
    assert all(".lora_" in name for name in names if ".optimizer." in name)
    assert not any(name.startswith("critic") for name in names)


@pytest.mark.slow  # engines and workers of their own
def test_each_reward_is_reported_and_their_sum_is_the_reward(adapted: Done) -> None:
    for step in (1, 2):
        parts = {name: last(adapted, f"reward/{name}", step) for name in WEIGHTS}
        total = sum(WEIGHTS[name] * part for name, part in parts.items())
        assert last(adapted, "reward/mean", step) == pytest.approx(total, abs=1e-6)
        assert 0 <= parts["format"] <= 1 and -1 <= parts["length"] <= 0 and parts["url"] > 0 and parts["model"] != 0
    assert last(adapted, "task/accuracy", 1) <= last(adapted, "reward/task", 1) + 1e-9


@pytest.mark.slow  # engines and workers of their own
def test_a_server_that_fails_at_first_is_asked_again(adapted: Done, server: Faulty) -> None:
    assert server.asked > 4


@pytest.mark.slow  # engines and workers of their own
def test_prompts_are_drawn_until_groups_vary(adapted: Done) -> None:
    assert last(adapted, "groups/generated", 1) in (8, 16)
    assert 0 < last(adapted, "groups/varied_fraction", 1) <= 1
    assert "value/loss" not in adapted.history and last(adapted, "kl/loss", 2) > 0


@pytest.mark.slow  # engines and workers of their own
def test_answers_are_learnt_beside_the_reward(adapted: Done) -> None:
    assert last(adapted, "ptx/loss", 2) < last(adapted, "ptx/loss", 1)


@pytest.mark.slow  # engines and workers of their own
def test_the_doctor_finds_a_sound_setup_sound(
    adapted: Done, many_rewards: Callable[..., RunConfig], storage: Path
) -> None:
    before = sorted(storage.rglob("*"))
    every = {"algorithm__filter_groups": False, "algorithm__filter_rounds": 8}  # their defaults: all groups are kept
    config = many_rewards("check", algorithm__advantage="gae", **every)
    lines = launch.examine(preflight.prepare(config), KEPT)
    assert [line.what for line in lines if not line.passed] == []
    assert len(lines) == 9  # the critic is a head here
    assert sorted(storage.rglob("*")) == before  # it leaves no run


@pytest.mark.slow  # engines and workers of their own
def test_a_score_that_is_missing_ends_the_run_and_names_its_prompt(
    adapted: Done, many_rewards: Callable[..., RunConfig], server: Faulty
) -> None:
    server.spoilt = True
    with pytest.raises(RunError, match=r"reward url: None is not a finite score, for prompt \d+"):
        train(many_rewards("spoilt"))


@pytest.mark.slow  # the same runs
def test_nothing_is_left_of_these_runs(resumed: Done, nothing_left: NothingLeft) -> None:
    KEPT.close()
    nothing_left(5)
