"""Exit codes, and the signals that end a command as Ctrl-C does."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rlx.cli.options import parse, settings_parser
from rlx.config.errors import ConfigError

COMMAND = """
import signal, sys, time
from rlx.cli.options import end_on_signals, exit_code

def command():
    end_on_signals()
    {before}
    print("ready", flush=True)
    time.sleep(60)
    return 0

sys.exit(exit_code(command, "interrupted: go on"))
"""


def start(before: str = "pass", ignored: bool = False) -> subprocess.Popen[str]:
    """A command that waits; `ignored`: as under nohup."""
    shell = ["sh", "-c", 'trap "" HUP; exec "$@"', "sh"] if ignored else []
    command = [*shell, sys.executable, "-c", COMMAND.format(before=before)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout and process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_ends_a_command_with_its_text_and_code(number: signal.Signals, code: int) -> None:
    process = start()
    process.send_signal(number)
    _, said = process.communicate(timeout=30)
    assert (process.returncode, said) == (code, "interrupted: go on\n")


def test_a_closed_terminal_does_not_end_what_was_started_with_nohup() -> None:
    process = start(ignored=True)
    process.send_signal(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=1.0)
    process.terminate()
    assert process.wait(timeout=30) == 143


def test_sigterm_while_ray_starts_has_the_code_of_sigterm() -> None:
    """Ray's own handler, which is there until the command replaces it, exits with the signal's number."""
    process = start(before="signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))")
    process.terminate()
    _, said = process.communicate(timeout=30)
    assert (process.returncode, said) == (143, "interrupted: go on\n")


def test_another_exit_keeps_its_code(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys\nfrom rlx.cli.options import exit_code\nexit_code(lambda: sys.exit(7))\n")
    assert subprocess.run([sys.executable, str(script)], check=False).returncode == 7


@pytest.mark.parametrize(
    ("option", "hint"),
    [
        ("--lr", "; here it is --train.actor-lr"),
        ("--learning-rate", "; here it is --train.actor-lr"),
        ("--output-dir=x", "; here it is --storage"),
        ("--num-generations", "; here it is --train.samples-per-prompt"),
        ("--kl-coef", "; here it is --algorithm.kl-coef"),
        ("--temperature", "; here it is --rollout.temperature"),
        ("--train.step", "; nearest: --train.steps"),
        ("--zzzzzz", ""),
    ],
)
def test_an_option_of_another_library_is_translated(option: str, hint: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse(settings_parser("a command", ""), [option, "1"])
    assert str(refused.value) == f"unknown option {option.partition('=')[0]}{hint}"
