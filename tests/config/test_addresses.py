"""Addresses with a password, token or key in any part: none is taken, kept or shown, whatever it is the address of."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlx.cli.main import main
from rlx.config.addresses import any_secret, holds_secret
from rlx.config.errors import ConfigError
from rlx.config.loading import from_tree

DRAWN = "X7dkfG3kdJ9sKd02kfLsK3jd"  # what a service may give out as a key
SECRET = [
    "http://u:SENTINEL@h/score",
    "http://SENTINEL@h/",
    "http://u%3ASENTINEL@h/",
    "http:\\\\u:SENTINEL@h\\",
    "//u:SENTINEL@h/score",
    "ht\ttp://u:SENTINEL@h/",
    "http://h/score?token=SENTINEL",
    "http://h/score?%2574oken=SENTINEL",
    "http://h/score?a=1;pass=SENTINEL",
    "http://h/score;jsessionid=SENTINEL",
    "http://h/score#access_key=SENTINEL",
    "http://h/score?Authorization=Bearer+SENTINEL",
    "http://h/score?code=SENTINEL",
    "http://h/score?subscriptionKey=SENTINEL",
    "http://h/score?jwt=SENTINEL&model=a",
    "http://h/score?next=http%3A%2F%2Fh%2F%3Ftoken%3DSENTINEL",
    f"http://h/services/{DRAWN}SENTINEL",
    "http://h/score?x=sk-abcdefghijklmnopqrstSENTINEL",
    "https://h/?sv=2&sig=SENTINEL",
    "https://h/?sv=2&X-Amz-Signature=SENTINEL",
    "https://h/?accessToken=SENTINEL",
    "https://h/?api_key=SENTINEL",
    "postgresql://h/db?password=SENTINEL",
    "postgresql://u:SENTI/SENTINEL@h/db",
    "postgresql://u:123/SENTINEL@h/db",
    "postgresql://u:#SENTINEL@h/db",
    "postgresql://u:?SENTINEL@h/db",
    "mysql://u@h/db?passwd=SENTINEL",
    "mysql://u%3ASENTINEL@h/db",
    "mssql+pyodbc:///?odbc_connect=DRIVER%3D%7BSQL%7D%3BUID%3Du%3BPWD%3DSENTINEL",
    "s3://AKIA:SENTINEL@bucket/x",
    "s3://SENTINEL@bucket/x",
    "s3://bucket/x?secret%5Fkey=SENTINEL",
    "s3://bucket/x?endpoint_override=http%3A%2F%2Fu%3ASENTINEL%40h",
    "s3://bucket/AKIAIOSFODNN7EXAMPLESENTINEL",
]
SETTINGS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "storage": lambda address: {"storage": address},
    "tracking.uri": lambda address: {"tracking": {"uri": address}},
    "reward.url": lambda address: {"reward": {"functions": {"url": 1}, "url": address}},
    "reward.judge_url": lambda address: {
        "reward": {"functions": {"judge": 1}, "judge_url": address, "judge_model": "m"}
    },
    "reward.model": lambda address: {"reward": {"functions": {"model": 1}, "model": address}},
    "model.path": lambda address: {"model": {"path": address}},
    "data.source": lambda address: {"data": {"source": address}},
    "checkpoint.init_from": lambda address: {"checkpoint": {"init_from": address}},
    "ray_address": lambda address: {"ray_address": address},
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("address", SECRET)
def test_an_address_with_a_secret_is_refused_and_never_shown(address: str, setting: str) -> None:
    for form in (address, [address], {"is": address}):  # of a wrong type it is not shown either
        with pytest.raises(ConfigError, match=rf"^config: {setting}: ") as refused:
            from_tree(SETTINGS[setting](form))
        assert "SENTINEL" not in str(refused.value)
        assert ("would be saved with the run: " in str(refused.value)) == (form is address)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("a\0b", "it has a null byte in it"),
        ("s3://bucket/a\0b", "it has a null byte in it"),
        ("a\udcffb", "it is no text in UTF-8"),
        ("a" * 300, "a file's name has 255 bytes at most, and one here 300"),
        (f"/tmp/{'é' * 128}/x.jsonl", "a file's name has 255 bytes at most, and one here 256"),
        (f"file:///tmp/{'a' * 300}", "a file's name has 255 bytes at most, and one here 300"),
        (f"sqlite:////tmp/{'a' * 300}", "a file's name has 255 bytes at most, and one here 300"),
        (f"sqlite:////tmp/{'a' * 300}?timeout=3", "a file's name has 255 bytes at most, and one here 300"),
        ("/a" * 3000, "a path has 4095 bytes at most, and this one 6000"),
    ],
)
def test_what_no_file_or_server_can_be_called_is_refused_by_name(address: str, reason: str, setting: str) -> None:
    with pytest.raises(ConfigError, match=rf"^config: {setting} = '.*: {reason}$") as refused:
        from_tree(SETTINGS[setting](address))
    assert len(str(refused.value)) < 400 and str(refused.value).isprintable()


def test_long_names_that_are_no_files_are_taken() -> None:
    patterns = (f"/d/[{'a' * 300}]*.jsonl", f"sqlite:///m.db?{'a' * 300}=1")
    for address in (f"http://h/{'a' * 300}", f"s3://bucket/{'a' * 300}", "a" * 255, *patterns):
        assert from_tree(SETTINGS["storage"](address)).storage == address


@pytest.mark.parametrize("setting", ["engine_options", "sampling_options"])
def test_options_of_vllm_with_a_secret_are_refused_and_never_shown(setting: str) -> None:
    options = {"skip_reading_prefix_cache": [{"url": "http://u:SENTINEL@h/"}]}
    with pytest.raises(ConfigError, match=rf"^config: rollout.{setting}: an address in it holds a password") as refused:
        from_tree({"rollout": {setting: options}})
    assert "SENTINEL" not in str(refused.value)


@pytest.mark.parametrize("address", SECRET)
def test_a_command_with_a_secret_ends_in_a_line_without_it_and_keeps_nothing(
    address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["rlx"])
    for words in (["--storage"], ["--reward.functions", "{url: 1}", "--reward.url"], ["--tracking.uri"]):
        assert main(["train", *words, address]) == 1
    shown = "".join(capfd.readouterr())
    assert shown.count("\n") == 3 and "SENTINEL" not in shown
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "address",
    [
        "postgresql://me@h/db?sslkey=/home/me/key.pem",
        "postgresql+psycopg2://me@db.example:5432/mlflow?sslmode=require",
        "sqlite:///a@b/c.db",
        "sqlite:////home/me/MyExperimentFolder2024/mlflow.db",
        "http://h:5000",
        "http://h:5000/a@b",
        "http://[::1]:8000/score?model=rm-1&max_tokens=5",
        "s3://my-key-bucket/token?region=eu-1&endpoint_override=http://tokens.example:1",
        "s3://bucket/9f86d081884c7d659a2feaa0c55ad015a3bf4f1b/MyVeryLongExperimentNameHere",
        "hf:openai/gsm8k/main@train",
        "data/a;key=1/**/*.jsonl",
        "Qwen/Qwen2.5-0.5B-Instruct",
        "ray://10.0.0.1:10001",
    ],
)
def test_user_names_ports_paths_and_ids_are_no_secret(address: str) -> None:
    assert not holds_secret(address) and not any_secret([{address: [address, 1, None]}])
    assert from_tree({"tracking": {"uri": address}}).tracking.uri == address


def test_each_setting_says_where_a_secret_belongs() -> None:
    for setting, place in (
        ("tracking.uri", "MLFLOW_TRACKING_PASSWORD"),
        ("reward.url", "reward.url_key_env"),
        ("reward.judge_url", "reward.judge_url_key_env"),
        ("storage", "AWS_SECRET_ACCESS_KEY"),
    ):
        with pytest.raises(ConfigError, match=place):
            from_tree(SETTINGS[setting]("http://u:SENTINEL@h/"))


@pytest.mark.parametrize(
    "key",
    [
        "sk-or-v1-" + "0a" * 16, "sk-ant-api03-" + "aB3-" * 6, "dop_v1_" + "0f" * 32, "lsv2_pt_" + "0f" * 16,
        "dapi" + "0f" * 16,
        "glpat-" + "a-B_3" * 4, "SG." + "aB3_-" * 6, "AIza" + "aB3_-" * 7, "nvapi-" + "aB3_-" * 8, "gsk_" + "aB3d" * 13,
    ],
)  # fmt: skip
def test_keys_as_services_issue_them_are_secrets_anywhere(key: str) -> None:
    assert holds_secret(f"https://host/{key}/x") and holds_secret(f"hf:org/name?{key}")


@pytest.mark.parametrize(
    "option",
    ["userkey", "appkey", "license_key", "passcode", "psw", "oauth", "access_tokens", "hmac", "otp", "sid", "cookie"],
)
def test_more_names_of_secrets(option: str) -> None:
    assert holds_secret(f"http://host/p?{option}=x") and holds_secret(f"http://host/p?a=b,{option}=x")


@pytest.mark.parametrize(
    "address",
    [
        "s3://b/p?sort_keys=1",
        "s3://b/p?num_keys=2",
        "http://h/p?code_version=1",
        "/data/sk-learn-experiments-of-2024/x",
    ],
)
def test_what_only_looks_alike_is_none(address: str) -> None:
    assert not holds_secret(address)
