"""Programs of a policy in the sandbox: everything hostile that was thought of is contained, and honest ones score 1."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import tracemalloc
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sandboxed_programs import HACKS, HOSTILE, UNIT_TESTS

from rlx.config.errors import ConfigError
from rlx.config.sections.reward import RewardConfig
from rlx.rewards import scoring
from rlx.rewards.sandbox import pool, reward, seccomp
from rlx.rewards.sandbox.pool import Limits, Program, Ran, Sandbox, SandboxError, Verdicts
from rlx.types import Checker, MarkedScores, Prompt, Response

KINDS = ("namespaces", "landlock")
LIMITS = Limits(
    cpu_s=0.5,
    idle_s=0.5,
    wall_s=20.0,
    memory=512 << 20,
    processes=16,
    disk=4 << 20,
    open_files=64,
    output=1 << 20,
)
SECRET = "s3cret-of-the-environment"
ADD = "def add(a, b):\n    return a + b\n"


def _has(kind: str) -> bool:
    try:
        return not pool.leaks(kind)
    except SandboxError:
        return False


@pytest.fixture(params=KINDS, scope="module")
def sandbox(request: pytest.FixtureRequest) -> Sandbox:
    if not _has(request.param):
        pytest.skip(f"this machine has no {request.param}")
    return Sandbox(request.param)


@pytest.fixture(scope="module")
def namespaces() -> Sandbox:
    if not _has("namespaces"):
        pytest.skip("this machine has no namespaces")
    return Sandbox("namespaces")


def run(sandbox: Sandbox, source: str, *inputs: str, limits: Limits = LIMITS) -> Ran:
    return sandbox.run(Program(source, inputs or ("",)), limits)[0]


def verdicts(sandbox: Sandbox, source: str, tests: str) -> Verdicts:
    return sandbox.run_tests(source, tests, LIMITS)


def response(text: str, answer: str, given: str | None = None, number: int = 0) -> Response:
    return Response(Prompt(number, (1,), "Write a program.", answer), text, given, num_tokens=1, finished=True)


def config(**settings: Any) -> RewardConfig:
    return RewardConfig(functions={"code": 1.0}, **settings)


def scored(rows: Sequence[Response], **settings: Any) -> MarkedScores:
    return reward.code(rows, config(**settings))


def processes_with(text: str) -> list[int]:
    """The processes of this machine with a text in their command line or environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if text.encode() in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Honest programs


def test_a_program_reads_and_prints(sandbox: Sandbox) -> None:
    ran = sandbox.run(Program("print(int(input()) ** 2)", ("3", "12")), LIMITS)
    assert [(each.output, each.is_good) for each in ran] == [(b"9\n", True), (b"144\n", True)]


@pytest.mark.parametrize(
    ("source", "output"),
    [
        ("import sys; print(sum(map(int, sys.stdin.read().split())))", b"6\n"),
        ("if __name__ == '__main__': print(open(0).read().split())", b"['1', '2', '3']\n"),
        ("import atexit, os\natexit.register(lambda: os.write(1, b'late'))\ninput()", b"late"),
        ("import threading\nthreading.Thread(target=lambda: print(input())).start()", b"1 2 3\n"),
        ("input(); print('before'); exit()", b"before\n"),
        ("print(len({str(i) for i in range(9)}), end='')", b"9"),
        ("open('note.txt', 'w').write('kept'); print(open('note.txt').read())", b"kept\n"),
        ("import tempfile\nwith tempfile.TemporaryFile() as f: print(f.write(b'12'))", b"2\n"),
        ("import sys; sys.setrecursionlimit(10**5)\ndef f(n): return n and 1 + f(n - 1)\nprint(f(9000))", b"9000\n"),
        ("import heapq, itertools, math, collections, decimal, re, bisect; print(math.comb(5, 2))", b"10\n"),
        ("print('ü', '\U0001f600')", "ü \U0001f600\n".encode()),
    ],
)
def test_what_honest_programs_do_works(sandbox: Sandbox, source: str, output: bytes) -> None:
    ran = run(sandbox, source, "1 2 3\n")
    assert (ran.output, ran.is_good) == (output, True)


@pytest.mark.slow
def test_a_program_may_have_processes_in_namespaces(namespaces: Sandbox) -> None:
    source = "import subprocess; print(subprocess.run(['echo', 'hi'], capture_output=True).stdout)"
    assert run(namespaces, source).output == b"b'hi\\n'\n"


def test_sets_have_the_same_order_each_time(sandbox: Sandbox) -> None:
    source = "print(list({str(i) for i in range(50)}))"
    assert run(sandbox, source).output == run(sandbox, source).output


# ---------------------------------------------------------------------------------------------------------------------
# Hostile programs


def heard(sandbox: Sandbox, source: str) -> Ran:
    return sandbox.run(Program(source, ("",), keeps_errors=True), LIMITS)[0]


def test_the_end_of_standard_error_is_kept(sandbox: Sandbox) -> None:
    said = heard(sandbox, "import sys\nsys.stderr.write('é' * 5000 + '\\n')\nopen('/none')")
    assert len(said.errors) == 1000 and said.error.endswith("No such file or directory: '/none' (line 3)")
    assert heard(sandbox, "import sys\nsys.stderr.write('e' * (1 << 26))\nprint(7)").output == b"7\n"
    here = heard(sandbox, "import os\nraise ValueError(os.getcwd(), object())").error
    folder = "/sandbox" if sandbox.kind == "namespaces" else "."
    assert here == f"ValueError: ('{folder}', <object object at 0x...>) (line 2)"


def test_a_program_whose_errors_nobody_reads_is_not_slowed_by_them(sandbox: Sandbox) -> None:
    ran = run(sandbox, "import sys\nsys.stderr.seek(0)\nsys.stderr.write('e' * (1 << 26))\nprint(7)")
    assert (ran.output, ran.errors, ran.is_good) == (b"7\n", "", True)


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_programs_are_contained(sandbox: Sandbox, name: str) -> None:
    source, ended = HOSTILE[name]
    started = time.monotonic()
    ran = run(sandbox, source)
    assert time.monotonic() - started < LIMITS.wall_s + 10
    assert ended in (None, ran.ended)
    assert b"had it" not in ran.output
    assert len(ran.output) <= LIMITS.output
    assert not processes_with("987.125")
    assert run(sandbox, "print(input())", "fine").output == b"fine\n"


@pytest.mark.parametrize("code", [3, -1, "'text'"])
def test_a_program_that_fails_is_not_right(sandbox: Sandbox, code: object) -> None:
    assert not run(sandbox, f"import sys\nprint(9)\nsys.exit({code})").is_good


@pytest.mark.slow
def test_nothing_is_left_on_the_disk(sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # where no other test has its programs
    for name in ("deep folders", "many files", "a huge file"):
        run(sandbox, HOSTILE[name][0])
    assert not os.listdir(tmp_path)


def test_tests_share_no_files(sandbox: Sandbox) -> None:
    source = "import os\nprint(os.listdir('.'))\nos.mkdir('d')\nopen('d/count', 'w').close()"
    assert [each.output for each in sandbox.run(Program(source, ("", "")), LIMITS)] == [b"[]\n", b"[]\n"]


FILL = """
import os, time
os.mkdir('d', 0o{mode:o})
for i in range({files}):
    with open(f'd/{{i}}', 'wb') as file:
        file.write(b'x' * {size})
time.sleep(0.2)
print('wrote it')
"""


@pytest.mark.parametrize(
    ("size", "files", "mode"), [(1 << 20, 3, 0o700), (1 << 20, 100, 0o700), (1, 3000, 0o700), (1 << 20, 100, 0o300)]
)
def test_all_files_of_a_program_count_together(sandbox: Sandbox, size: int, files: int, mode: int) -> None:
    ran = run(sandbox, FILL.format(size=size, files=files, mode=mode), limits=replace(LIMITS, cpu_s=2.0))
    assert (b"wrote it" in ran.output) == (files == 3)


@pytest.mark.slow
def test_a_program_that_takes_too_long_is_not_run_again(sandbox: Sandbox) -> None:
    ran = sandbox.run(Program("while input(): pass", ("", "1\n2", *["\n".join("1" * 99)] * 5)), LIMITS)
    assert len(ran) == 7
    ran = sandbox.run(Program("while True: pass", ("", "", "")), LIMITS)
    assert [each.ended for each in ran] == ["cpu"]


# ---------------------------------------------------------------------------------------------------------------------
# Files, secrets, networks


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder that every user may read and write."""
    folder = Path(tempfile.mkdtemp())
    (folder / "answers.txt").write_text("the expected answer")
    folder.chmod(0o777)
    (folder / "answers.txt").chmod(0o666)
    return folder


def test_files_of_the_machine_are_out_of_reach(sandbox: Sandbox, outside: Path) -> None:
    source = f"""
import os, shutil
def attempt(what):
    try:
        what()
    except BaseException as error:
        return
    print(what.__name__)
place = {str(outside)!r}
def reads(): open(place + "/answers.txt").read()
def writes(): open(place + "/answers.txt", "a").write("x")
def makes(): open(place + "/new", "w")
def removes(): os.remove(place + "/answers.txt")
def lists(): os.listdir(place)
def changes(): os.chmod(place + "/answers.txt", 0)
def touches(): os.utime(place + "/answers.txt", (0, 0))
def cuts(): os.truncate(place + "/answers.txt", 0)
def home(): os.listdir("/root")
def passwords(): open("/etc/shadow").read()
def system(): open("/usr/rlx-test", "w")
def links(): os.symlink(place, "link"); open("link/answers.txt").read()
for what in (reads, writes, makes, removes, lists, changes, touches, cuts, home, passwords, system, links):
    attempt(what)
"""
    mode, modified = (outside / "answers.txt").stat().st_mode, (outside / "answers.txt").stat().st_mtime
    assert run(sandbox, source).output == b""
    assert [path.name for path in outside.iterdir()] == ["answers.txt"]
    assert (outside / "answers.txt").read_text() == "the expected answer"
    assert ((outside / "answers.txt").stat().st_mode, (outside / "answers.txt").stat().st_mtime) == (mode, modified)


def test_secrets_are_out_of_reach(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    source = f"""
import os
print(dict(os.environ))
names = [str({os.getpid()}), str(os.getppid()), "self", "1"]
try:
    names += os.listdir("/proc")
except OSError:
    pass
for name in names:
    for file in ("environ", "cmdline", "maps", "mem", "fd/0", "root/etc/shadow", "cwd/pyproject.toml"):
        try:
            print(name, open(f"/proc/{{name}}/{{file}}", "rb").read(1000))
        except (OSError, ValueError, OverflowError):
            pass
"""
    output = run(sandbox, source).output
    assert SECRET.encode() not in output
    assert b"root:" not in output and b"project" not in output
    assert eval(output.splitlines()[0]).keys() == {"HOME", "LANG", "PATH", "PYTHONHASHSEED", "TMPDIR"}


def test_memory_of_other_processes_is_out_of_reach(sandbox: Sandbox) -> None:
    source = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
for process in (os.getppid(), 1, %d):
    print(libc.ptrace(16, process, 0, 0), end=" ")
    iov = (ctypes.c_char * 32)()
    print(libc.process_vm_readv(process, ctypes.byref(iov), 1, ctypes.byref(iov), 1, 0), end=" ")
"""
    assert run(sandbox, source % os.getpid()).output.split() == [b"-1"] * 6


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.0)
        yield server


@pytest.mark.parametrize("family", ["AF_INET", "AF_INET6", "AF_UNIX", "AF_NETLINK"])
@pytest.mark.parametrize("kind", ["SOCK_STREAM", "SOCK_DGRAM"])
def test_networks_are_out_of_reach(sandbox: Sandbox, listener: socket.socket, family: str, kind: str) -> None:
    address = {"AF_INET": listener.getsockname(), "AF_INET6": ("::1", listener.getsockname()[1])}.get(family, "x")
    source = f"""
import socket
try:
    s = socket.socket(socket.{family}, socket.{kind})
    s.connect({address!r})
    print("connected")
except OSError as error:
    print("no")
"""
    assert run(sandbox, source).output == b"no\n"
    with pytest.raises(BlockingIOError):
        listener.accept()


def test_a_program_gains_no_privileges(sandbox: Sandbox) -> None:
    source = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
print(libc.unshare(0x10000000), libc.unshare(0x20000), libc.mount(b"none", b"/", b"tmpfs", 0, None), end=" ")
print(libc.chroot(b"/usr"), libc.syscall(321, 0, 0, 0), libc.syscall(425, 8, 0), libc.keyctl(0, -3, 0, 0, 0)
      if hasattr(libc, "keyctl") else libc.syscall(250, 0, -3, 0))
try:
    for line in open("/proc/self/status"):
        if line.startswith(("CapEff", "CapPrm", "CapBnd", "NoNewPrivs")):
            print(line.split()[1])
except OSError:
    print("0\\n0\\n0\\n1")
"""
    lines = run(sandbox, source).output.split()
    assert lines[:7] == [b"-1"] * 7
    assert [int(each, 16) for each in lines[7:]] == [0, 0, 0, 1]


def test_without_namespaces_a_program_has_no_other_process() -> None:
    if not _has("landlock"):
        pytest.skip("this machine has no Landlock")
    victim = subprocess.Popen(["sleep", "60"])
    source = f"""
import ctypes, os, resource, subprocess
libc = ctypes.CDLL(None, use_errno=True)
def attempt(what, *args):
    try:
        what(*args)
    except OSError as error:
        return
    print(what, args)
attempt(os.fork)
attempt(subprocess.run, ["true"])
for send in (lambda: os.kill({victim.pid}, 9), lambda: os.kill({victim.pid}, 0)):
    attempt(send)
attempt(resource.prlimit, {victim.pid}, resource.RLIMIT_CPU, (1, 1))
attempt(os.setpriority, os.PRIO_PROCESS, {victim.pid}, 19)
attempt(os.sched_setaffinity, {victim.pid}, [0])
import fcntl
reads, writes = os.pipe()
attempt(fcntl.fcntl, reads, fcntl.F_SETOWN, {victim.pid})
print(libc.prctl(1, 0, 0, 0, 0))
"""
    try:
        assert run(Sandbox("landlock"), source).output == b"-1\n"
        assert victim.poll() is None
    finally:
        victim.kill()
        victim.wait()


def test_the_filter_refuses_other_kinds_of_system_calls() -> None:
    steps = seccomp.program(alone=True)
    assert all(step.if_true <= 255 and step.if_false <= 255 for step in steps)
    ends = [i for i, step in enumerate(steps) if step.code == 0x06]
    for i, step in enumerate(steps):  # every jump stays in the program, whose last step allows
        assert i + 1 + max(step.if_true, step.if_false) <= ends[-1] or i == ends[-1]
    assert steps[-1].value == 0x7FFF0000


# ---------------------------------------------------------------------------------------------------------------------
# Unit tests


@pytest.mark.parametrize("name", UNIT_TESTS)
def test_unit_tests(namespaces: Sandbox, name: str) -> None:
    source, tests, passed = UNIT_TESTS[name]
    assert verdicts(namespaces, source, tests).passed == passed


TESTS = """
cases = [((1, 1234566), 1234567)]
assert add(1, 1234566) == 1234567
assert all(add(*given) == wanted for given, wanted in cases)
assert all(map(lambda case: add(*case[0]) == case[1], cases))
assert not add(1, 1234566) != 1234567
assert abs(add(1, 1234566) - 1234567) < 1
assert add(1, 1234566) in [1234567]
assert [add(1, 1234566)] == [1234567]
def test_more():
    assert add(1, 1234566) == 1234567
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", HACKS)
def test_no_hack_passes_a_test(namespaces: Sandbox, name: str) -> None:
    outcome = verdicts(namespaces, HACKS[name], TESTS)
    assert outcome.passed == [False] * 8


def test_the_tests_hold_for_an_honest_program(sandbox: Sandbox) -> None:
    assert verdicts(sandbox, ADD, TESTS).passed == [True] * 8


@pytest.mark.parametrize("name", ["equal to all", "sends answers", "endless call", "writes to all files"])
def test_landlock_holds_for_hacks_too(sandbox: Sandbox, name: str) -> None:
    assert not any(verdicts(sandbox, HACKS[name], TESTS).passed)


@pytest.mark.slow
def test_a_name_that_is_no_module_of_its_own_name_is_not_imported(namespaces: Sandbox) -> None:
    source = "import unittest.mock as math\nmath.__name__ = 'os'\nimport os as add\n"
    assert verdicts(namespaces, source, "assert add.getcwd()\nassert math.sqrt(4) == 2").passed == [False, False]


# ---------------------------------------------------------------------------------------------------------------------
# The reward function

PAIRS = json.dumps([{"stdin": "2 3", "stdout": "5\n"}, {"stdin": "4 4", "stdout": "8"}])
SUM = "```python\nprint(sum(map(int, input().split())))\n```"


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("x = 1", "x = 1"),
        ("So:\n```python\na\n```\nor\n```python\nb\n```\nDone.", "b\n"),
        ("```\na\n```", "a\n"),
        ("```py\na\n```\nprints\n```\n5\n```", "a\n"),
        ("```python\na\n```\nrun it:\n```bash\npython a.py\n```", "a\n"),
        ("```bash\nls\n```", ""),
        ("  ```Python\n  a\n  ```", "a\n"),
        ("1. So:\n\n   ```python\n\n   if a:\n       b\n  c\n   ```\n", "\nif a:\n    b\nc\n"),
        ("1. ```python\n   if a:\n     b\n   ```\n", "if a:\n  b\n"),
        ("\t```python\n\tif a:\n\t\tb\n\t```\n", "if a:\n\tb\n"),
        ("  ```python\nif a:\n b\n  ```", "if a:\n b\n"),  # moves all lines or none
        ("  ```python\n   a\n  ```", " a\n"),
        ("  ```python\n  a\n  b", "a\nb"),
        ("Here it is: ```python\na\n```", "a\n"),
        ("With `a` and `b`: ```python\na\n```", "a\n"),
        ("So: ```bash\nls\n```\nand ```Python \na\n```", "a\n"),
        ("It ends with ```\n```python\na\n```", "a\n"),
        ("```x``` is ```y```, or `z` and ```python\n```python\na\n```", "a\n"),
        ("````python\n```\na\n````", "```\na\n"),
        ("~~~python\na\n~~~", "a\n"),
        ("```python\na\nb", "a\nb"),
        ("", ""),
    ],
)
def test_the_program_in_a_completion(text: str, program: str) -> None:
    assert reward.program_in(text) == program


def test_lines_of_fences_alone_take_no_time() -> None:
    began = time.process_time()
    assert reward.program_in("`" * 200_000 + "x`") == "`" * 200_000 + "x`"
    assert reward.program_in("`x` " * 100_000 + "```python x")
    assert reward.program_in("~" * 200_000 + " " * 200_000) == ""
    assert reward.program_in("x" * 200_000 + "```" + "y" * 200_000 + " " * 200_000 + "z")
    assert time.process_time() - began < 1


@pytest.mark.slow
def test_a_program_in_an_indented_fence_scores_as_any_other() -> None:
    indented = "1. So:\n\n   ```python\n   a, b = input().split()\n   if a:\n       print(int(a) + int(b))\n   ```\n"
    rows = [response(indented, PAIRS), response(f"It is: {SUM}", PAIRS)]
    assert scored(rows).scores == [1, 1]


@pytest.mark.slow
def test_scores_of_pairs() -> None:
    first = '```python\nprint(5 if input() == "2 3" else 9)\n```'
    swapped = "```python\nprint({'2 3': 8, '4 4': 5}[input()])\n```"  # the answer of the other case
    rows = [response(text, PAIRS) for text in (SUM, first, swapped, "", "```python\nprint(5); exit(1)\n```")]
    assert scored(rows).scores == [1, 0, 0, 0, 0]
    assert scored(rows, code_score="share").scores == [1, 0.5, 0, 0, 0]


@pytest.mark.slow
def test_scores_of_unit_tests() -> None:
    tests = "assert add(1, 2) == 3\nassert add(2, 2) == 4"
    rows = [response(text, tests) for text in (ADD, ADD.replace("a + b", "3"))]
    assert scored(rows).scores == [1, 0]
    assert scored(rows, code_score="share").scores == [1, 0.5]


@pytest.mark.parametrize("printed", ["5", "5\n\n", "5  \n", "5\r\n"])
def test_white_space_at_the_ends_of_lines_does_not_count(printed: str) -> None:
    rows = [response(f"print({printed!r}, end='')", json.dumps([{"stdin": "", "stdout": "5\n"}]))]
    assert scored(rows).scores == [1]


def test_the_answer_pattern_finds_the_program() -> None:
    rows = [response("no", PAIRS, given="print(sum(map(int, input().split())))"), response(SUM, PAIRS, given=None)]
    assert scored(rows, answer_pattern="<(.*)>").scores == [1, 0]


@pytest.mark.slow
def test_a_program_that_a_limit_ended_is_marked() -> None:
    scores = scored([response(SUM, PAIRS), response("while True: pass", PAIRS)], code_cpu_s=0.5)
    assert (scores.scores, scores.marks) == ([1, 0], {"code_limited": [0, 1]})


def test_all_of_it_through_the_scorers() -> None:
    def never() -> Checker:
        raise AssertionError("asked")

    settings = RewardConfig(functions={"code": 2.0, "length": 1.0}, length_target=1)
    scores = scoring.score([response(SUM, PAIRS), response("no", PAIRS)], scoring.scorers(settings, never), settings)
    assert (scores.total, scores.is_correct) == ([2, 0], [True, False])
    assert scores.by_function["code_limited"] == [0, 0]
    assert set(settings.reported) == set(scores.by_function)


@pytest.mark.slow  # ten seconds of programs that never end
def test_many_slow_programs_get_less_time() -> None:
    """Only a few are given all of their time, and an honest quick one at the end is still right."""
    rows = [response(f"while True: {i}", PAIRS) for i in range(8)] + [response(SUM, PAIRS)]
    started = os.times()
    scores = scored(rows, code_cpu_s=2.0, code_mean_cpu_s=0.2, code_parallel=2)
    ended = os.times()
    assert scores.scores == [0] * 8 + [1]
    assert ended.children_user - started.children_user < 8.0  # rather than 16; two that overlap, and eight short ones


MANY = json.dumps([{"stdin": str(i), "stdout": "0"} for i in range(60)])


def computed_s(rows: Sequence[Response], **settings: Any) -> tuple[MarkedScores, float]:
    """The scores, and the seconds of processors that they took."""
    started = os.times()
    scores, ended = scored(rows, **settings), os.times()
    return scores, ended.children_user - started.children_user


@pytest.mark.slow
def test_a_program_is_not_run_on_once_its_score_is_known() -> None:
    slow = "sum(range(10_000_000))\nprint(int(input()) > 1)"  # is wrong from the first test on
    scores, seconds = computed_s([response(slow, MANY)])
    assert (scores.scores, scores.marks) == ([0], {"code_limited": [0]}) and seconds < 10  # of 60 times 0.3 s
    half = "print(0 if int(input()) < 30 else 1)"
    assert scored([response(half, MANY)], code_score="share").scores == [0.5]


@pytest.mark.slow
def test_a_program_with_many_slow_tests_gets_no_more_time_than_the_batch_has() -> None:
    slow = "sum(range(10_000_000))\nprint(0)"
    for how in ("all", "share"):
        scores, seconds = computed_s([response(slow, MANY)], code_mean_cpu_s=0.2, code_score=how)
        assert scores.marks == {"code_limited": [1]} and scores.scores[0] < 0.5 and seconds < 10


@pytest.mark.slow
def test_what_programs_print_does_not_fill_the_memory() -> None:
    flood = "import os\nos.write(1, b'\\xff' * (1 << 20))"
    tracemalloc.start()
    scores = scored([response(flood, MANY)], code_score="share", code_output_mb=2)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert scores.scores == [0] and most < 64 << 20  # rather than 60 times six bytes for each


@pytest.mark.parametrize("answer", ["[]", "[1]", '[{"stdin": "1"}]', '{"stdin": "1", "stdout": 1}', "x = 1", "def ("])
def test_answers_without_tests_are_refused_before_the_start(answer: str) -> None:
    with pytest.raises(ConfigError, match=r"reward code: the answer of prompt 7 holds no tests: "):
        scoring.try_functions(config(), [Prompt(6, (), "?", PAIRS), Prompt(7, (), "?", answer)])


EVAL_PLUS = """
import numpy as np

def is_floats(x) -> bool:
    return isinstance(x, float) or isinstance(x, np.ndarray) and x.dtype == np.float64

def assertion(out, exp):
    if out != exp and is_floats(exp):
        assert np.allclose(out, exp)
    else:
        assert out == exp

for given, wanted in [(1, 2), (5, 6)]:
    assertion(f(given), wanted)
"""
PASSED = {
    "the form of EvalPlus": EVAL_PLUS,
    "a helper that is not called": "import numpy as np\ndef zeros():\n    return np.zeros(3)\nassert f(1) == 2",
    "or": "import numpy as np\nassert f(1) == 2 or np.isclose(f(1), 2)",
    "if": "import numpy as np\nassert f(1) == 2 if f(1) else np.isclose(f(1), 2)",
    "a fixture": "import pytest\n@pytest.fixture\ndef one():\n    return 1\ndef test_f():\n    assert f(1) == 2",
    "try": "import numpy as np\ntry: assert np.isclose(f(1), 2)\nexcept NameError: assert f(1) == 2",
    "a message": "import numpy as np\nassert f(1) == 2, np.array([2])",
    "a comparison after another": "import numpy as np\nassert not f(1) < 2 < np.inf",
    "an early end": "import numpy as np\ndef test_f():\n    if f(1) == 2: return\n    assert np.isclose(f(1), 2)",
    "a generator": "import pytest\ndef test_f():\n    pytest.skip()\n    yield\nassert f(1) == 2",
    "a replaced test": "import pytest\ndef test_f():\n    pytest.fail()\ndef test_f():\n    assert f(1) == 2",
    "a variable": "import numpy as np\ndef test_f():\n    np = f(1)\n    assert np == 2",
    "its own module": "import numpy\nfrom solution import f as numpy\nassert numpy(1) == 2",
    "an import that may fail": "try: import numpy\nexcept ImportError: numpy = None\nassert numpy or f(1) == 2",
    "a name of the program": "from numpy import f\nimport Stack\nassert f(1) == 2",
    "modules of Python": "import os.path, solution as s, program\nassert s.f(1) == program.f(1) == 1 + len(os.sep)",
}


@pytest.mark.parametrize("tests", PASSED.values(), ids=PASSED)
def test_tests_that_a_right_program_passes_are_taken(namespaces: Sandbox, tests: str) -> None:
    passed = verdicts(namespaces, "def f(x):\n    return x + 1", tests).passed
    assert passed and all(passed)
    scoring.try_functions(config(), [Prompt(7, (), "?", tests)])


PYTEST = "import pytest\ndef test_f():\n    x = -1\n    with pytest.raises(ValueError): f(x)"
FAILED = {
    "a context": (PYTEST, "pytest"),
    "a part of it": ("import math, numpy.linalg as la\nassert 1 == la.norm(f(1))", "numpy"),
    "a loop": ("import torch\nfor x in torch.ones(3):\n    f(x)", "torch"),
    "an import": ("def test_f():\n    from numpy.testing import assert_equal\n    assert_equal(f(1), 2)", "numpy"),
    "a decorator": ("import pytest\n@pytest.mark.slow\ndef test_f():\n    assert f(1) == 2", "pytest"),
    "a deep one": ("import numpy as np\nassert np.e + " + " + ".join(["f(1)"] * 1500), "numpy"),
}


@pytest.mark.parametrize(("tests", "package"), FAILED.values(), ids=FAILED)
def test_tests_that_no_program_passes_are_refused_before_the_start(
    namespaces: Sandbox, tests: str, package: str
) -> None:
    assert not any(verdicts(namespaces, "def f(x):\n    return x + 1", tests).passed)
    for how in ("all", "share"):
        with pytest.raises(ConfigError, match=f"the answer of prompt 7 uses {package} in 1 of its 1 tests, which no"):
            scoring.try_functions(config(code_score=how), [Prompt(7, (), "?", tests)])


def test_where_a_share_counts_one_test_may_need_a_package(caplog: pytest.LogCaptureFixture) -> None:
    prompts = [Prompt(7, (), "?", f"{PYTEST}\nassert f(1) == 2")]
    with pytest.raises(ConfigError, match=r"uses pytest in 1 of its 2 tests.*\(--reward.code-score share pays for"):
        scoring.try_functions(config(), prompts)
    scoring.try_functions(config(code_score="share"), prompts)
    assert caplog.messages == ["reward code: tests import pytest, which the sandbox lacks: those that use it fail"]


@pytest.mark.parametrize("answer", ["assert f(1) == '\\d'", PAIRS])
def test_the_tests_of_100_000_prompts_are_looked_at_in_seconds(
    answer: str, recwarn: pytest.WarningsRecorder, capfd: pytest.CaptureFixture[str]
) -> None:
    check, started = scoring.answer_check(config()), time.process_time()
    assert check and scoring.answer_check(RewardConfig(answer_pattern="(.*)")) is None
    for _ in range(10_000):
        check(answer)
    assert time.process_time() - started < 2 and not recwarn and capfd.readouterr().err == ""
    with pytest.raises(ValueError, match=r"^reward code: the answer holds no tests: Python without a test$"):
        check("x = 1")


def test_answers_without_tests_score_0_in_a_run(caplog: pytest.LogCaptureFixture) -> None:
    assert scored([response(SUM, "[]"), response(SUM, "def ("), response(SUM, PAIRS)]).scores == [0, 0, 1]
    assert len([each for each in caplog.messages if "holds no tests" in each]) == 2


@pytest.mark.slow  # each kind of hostile program has a test of its own
def test_a_hundred_hostile_answers_take_less_than_a_minute() -> None:
    """With the settings' own limits, among honest answers; the run is unharmed."""
    hostile = [response(f"# {i}\n{list(HOSTILE.values())[i % len(HOSTILE)][0]}", PAIRS) for i in range(100)]
    rows = [
        row for i, row in enumerate(hostile) for row in ([row, response(f"# {i}\n" + SUM, PAIRS)][: 1 + (i % 10 == 0)])
    ]
    started, before = time.monotonic(), os.times()
    scores = scored(rows).scores
    used = os.times().children_user + os.times().children_system - before.children_user - before.children_system
    print(f"{time.monotonic() - started:.1f} s, {used:.1f} s of processors")
    assert min(time.monotonic() - started, used / 2) < 60  # other tests may take processors away
    assert [score for row, score in zip(rows, scores, strict=True) if "```" in row.text] == [1.0] * 10
    assert sum(scores) == 10
    assert not processes_with("987.125")


# ---------------------------------------------------------------------------------------------------------------------
# Which sandbox


def test_a_weak_sandbox_leaks_and_is_found_out() -> None:
    assert "read" in pool.leaks("limits") and "write" in pool.leaks("limits")


def test_strict_refuses_a_machine_without_walls(monkeypatch: pytest.MonkeyPatch) -> None:
    def leaks(kind: str) -> list[str]:
        if kind == "namespaces":
            raise SandboxError("unshare: Operation not permitted")
        return ["read", "connect"]

    monkeypatch.setattr(pool, "leaks", leaks)
    pool._strongest.cache_clear()
    try:
        with pytest.raises(
            ConfigError, match=r"^reward.sandbox: .*unshare: Operation not permitted; landlock: a program can read"
        ):
            Sandbox.open(strict=True)
        assert Sandbox.open(strict=False) == Sandbox("limits")
    finally:
        pool._strongest.cache_clear()


@pytest.mark.slow
def test_the_limits_kind_still_limits() -> None:
    weak = Sandbox("limits")
    assert run(weak, "print(input())", "3").output == b"3\n"
    assert run(weak, "while True: pass").ended == "cpu"
    assert run(weak, HOSTILE["fork bomb"][0]).ended == "cpu"
    assert run(weak, "x = bytearray(10 << 30)").code == 1


@pytest.mark.slow
def test_an_unprivileged_user_has_both_sandboxes_too() -> None:
    """As on most machines, where nobody maps a second user. Python and rlx are shown where that user may read them."""
    if os.geteuid() or not _has("namespaces") or not all(map(shutil.which, ("unshare", "setpriv", "mount"))):
        pytest.skip("needs root and the tools of util-linux")
    packages = Path(os.__file__).parent, Path(pytest.__file__).parents[1], Path(pool.__file__).parents[3]
    code = (
        "import os, rlx.rewards.sandbox.pool as p\n"
        "limits = p.Limits(2.0, 1.0, 20.0, 1 << 29, 16, 1 << 20, 64, 1 << 20)\n"
        "for kind in p.STRICT:\n"
        "    s = p.Sandbox(kind)\n"
        "    ran = s.run(p.Program('import os; print(os.getuid(), input())', ('3',)), limits)[0].output\n"
        "    bomb = 'import os, time\\nfor i in range(99): os.fork() or time.sleep(9)'\n"
        "    forks = s.run(p.Program(bomb, ('',)), limits)[0]\n"
        "    tests = s.run_tests('def f(x): return x', 'assert f(1) == 1', limits).passed\n"
        "    print(os.getuid(), kind, p.leaks(kind), ran, forks.code, tests)\n"
    )
    script = f"""
set -e
mount -t tmpfs none /mnt && mkdir /mnt/python /mnt/packages /mnt/rlx && chmod 755 /mnt
mount --bind {sys.base_prefix} /mnt/python
mount --bind {packages[1]} /mnt/packages
mount --bind {packages[2]} /mnt/rlx
cd /
exec setpriv --reuid 4321 --regid 4321 --clear-groups --inh-caps=-all --bounding-set=-all \\
    env -i PYTHONPATH=/mnt/rlx:/mnt/packages /mnt/python/bin/{Path(sys.executable).resolve().name} -c "$0"
"""
    done = subprocess.run(["unshare", "-m", "sh", "-c", script, code], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == [
        "4321 namespaces [] b'0 3\\n' 1 [True]",
        "4321 landlock [] b'4321 3\\n' 1 [True]",
    ], done.stderr


@pytest.mark.slow
def test_a_launcher_ends_with_its_worker() -> None:
    code = (
        "import sys, rlx.rewards.sandbox.pool as p\n"
        "print('ready', flush=True)\n"
        "limits = p.Limits(60.0, 60.0, 60.0, 1 << 29, 16, 1 << 20, 64, 1 << 20)\n"
        "p.Sandbox(sys.argv[1]).run(p.Program('import time\\nwhile True: 876.5', ('',)), limits)\n"
    )
    for kind in filter(_has, KINDS):
        worker = subprocess.Popen([sys.executable, "-c", code, kind], stdout=subprocess.PIPE)
        assert worker.stdout and worker.stdout.readline() == b"ready\n"
        time.sleep(2.0)
        children = _descendants(worker.pid)
        assert len(children) >= 2
        worker.send_signal(signal.SIGKILL)
        worker.wait()
        deadline = time.monotonic() + 10
        while any(Path(f"/proc/{each}").exists() for each in children) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not [each for each in children if Path(f"/proc/{each}").exists()]


def _descendants(process: int) -> list[int]:
    parents: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found = [process]
    for each in found:
        found += [child for child, parent in parents.items() if parent == each]
    return found[1:]


def test_several_threads_share_one_library() -> None:
    found: list[str] = []
    pool._copied.cache_clear()
    threads = [threading.Thread(target=lambda: found.append(pool._library())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1 and Path(found[0]).is_dir()
