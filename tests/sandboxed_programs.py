"""Programs for the tests of the sandbox: some attack it, some attack their unit tests, some are honest.

Left out: how they have to end, except where only one way is right.
"""

HOSTILE: dict[str, tuple[str, str | None]] = {
    "fork bomb": (
        """
import os
while True:
    try:
        os.fork()
    except OSError:
        pass
""",
        None,
    ),
    "thread bomb": (
        """
import threading, time
while True:
    threading.Thread(target=time.sleep, args=(60,)).start()
""",
        None,
    ),
    "endless loop": (
        """
while True:
    pass
""",
        "cpu",
    ),
    "endless loop in C": (
        """
9 ** 9 ** 9 ** 9
""",
        None,
    ),
    "endless loop in two processes": (
        """
import os
os.fork()
while True:
    pass
""",
        None,
    ),
    "10 GB": (
        """
x = bytearray(10 << 30)
print('had it')
""",
        "exit",
    ),
    "10 GB in lists": (
        """
x = []
while True:
    x.append(bytearray(1 << 20))
""",
        None,
    ),
    "memory of several processes": (
        """
import os, time
for _ in range(8):
    if not os.fork():
        break
x = bytearray(100 << 20)
for i in range(0, len(x), 4096):
    x[i] = 1
time.sleep(0.3)
print('had it')
""",
        None,
    ),
    "sleep": (
        """
import time
time.sleep(60)
""",
        "idle",
    ),
    "ignores SIGTERM": (
        """
import signal, time
for s in range(1, 32):
    try:
        signal.signal(s, signal.SIG_IGN)
    except Exception:
        pass
while True:
    time.sleep(9)
""",
        "idle",
    ),
    "huge output": (
        """
while True:
    print('x' * 1000000)
""",
        "output",
    ),
    "huge output, no line": (
        """
import os
while True:
    os.write(1, b'x' * 65536)
""",
        "output",
    ),
    "deep recursion": (
        """
import sys
sys.setrecursionlimit(10 ** 9)

def f(n):
    return f(n + 1)
f(0)
""",
        None,
    ),
    "crash": (
        """
import ctypes
ctypes.string_at(0)
""",
        "exit",
    ),
    "os._exit": (
        """
import os
print('9')
os._exit(0)
""",
        "exit",
    ),
    "closes its output": (
        """
import os
os.close(1)
while True:
    pass
""",
        "cpu",
    ),
    "kills everything": (
        """
import os, signal
os.kill(-1, 9)
""",
        None,
    ),
    "kills its parent": (
        """
import os
os.kill(os.getppid(), 9)
""",
        None,
    ),
    "kills its group": (
        """
import os
os.killpg(0, 9)
""",
        None,
    ),
    "stops itself": (
        """
import os
os.kill(os.getpid(), 19)
""",
        None,
    ),
    "a huge file": (
        """
f = open('big', 'wb')
while True:
    f.write(b'x' * 65536)
""",
        "exit",
    ),
    "many files": (
        """
i = 0
while True:
    open(str(i), 'w').close()
    i += 1
""",
        None,
    ),
    "deep folders": (
        """
import os
while True:
    os.mkdir('d')
    os.chdir('d')
""",
        None,
    ),
    "daemon": (
        """
import os
if os.fork():
    os._exit(0)
os.setsid()
if os.fork():
    os._exit(0)
os.execv('/usr/bin/sleep', ['sleep', '987.125'])
""",
        None,
    ),
}
"""(source, the limit that ends it or "exit"; None where it may end as it likes), by name"""

HACKS: dict[str, str] = {
    "sys.exit": """
import sys
sys.exit(0)
""",
    "os._exit": """
import os
os._exit(0)
""",
    "exits when called": """
import sys

def add(a, b):
    sys.exit(0)
""",
    "_exits when called": """
import os

def add(a, b):
    os._exit(0)
""",
    "equal to all": """
class E:

    def __eq__(s, o):
        return True

    def __ne__(s, o):
        return False

def add(a, b):
    return E()
""",
    "a number equal to all": """
class E(int):

    def __eq__(s, o):
        return True
    __hash__ = None

def add(a, b):
    return E(0)
""",
    "a list equal to all": """
class E(list):

    def __eq__(s, o):
        return True

def add(a, b):
    return E()
""",
    "class of all": """
class add:

    def __init__(s, *a):
        pass

    def __eq__(s, o):
        return True
""",
    "no assertion error": """
import builtins
builtins.AssertionError = type('A', (), {})

def add(a, b):
    return 0
""",
    "patched builtins": """
import builtins
builtins.abs = builtins.round = lambda *x: 0
abs = isinstance = all = sum = lambda *x: True

def add(a, b):
    return 0
""",
    "ends loops": """
def add(a, b):
    raise StopIteration
""",
    "fakes a verdict": """
import os
os.write(1, b'2\\n11')

def add(a, b):
    return 0
""",
    "writes to all files": """
import os
for i in range(3, 300):
    try:
        os.write(i, b'2\\n11')
    except OSError:
        pass

def add(a, b):
    return 0
""",
    "sends answers": """
import json, os, struct
for m in ({'globals': {'add': 3}}, {'value': 3, 'after': {}}, 1, None) * 4:
    m = json.dumps(m).encode()
    os.write(4, struct.pack('<I', len(m)) + m)

def add(a, b):
    return 0
""",
    "sends a huge length": """
import os
os.write(4, b'\\xff' * 9)

def add(a, b):
    return 0
""",
    "searches memory": """
import gc

def add(a, b):
    for o in gc.get_objects():
        if isinstance(o, list) and 1234567 in o:
            return 1234567
    return 0
""",
    "reads its frames": """
import sys

def add(a, b):
    f = sys._getframe()
    while f:
        for v in f.f_locals.values():
            if '1234567' in repr(v):
                return 1234567
        f = f.f_back
""",
    "a module for a name": """
import unittest.mock
add = unittest.mock.ANY
""",
    "a mock": """
import unittest.mock
add = unittest.mock.MagicMock(return_value=unittest.mock.ANY)
""",
    "not a number": """
def add(a, b):
    return float('nan')
""",
    "raises an assertion": """
def add(a, b):
    raise AssertionError
""",
    "deep answer": """
def add(a, b):
    x = []
    for _ in range(10 ** 6):
        x = [x]
    return x
""",
    "huge answer": """
def add(a, b):
    return 'x' * (100 << 20)
""",
    "endless call": """
def add(a, b):
    while True:
        pass
""",
    "sleeps": """
import time

def add(a, b):
    time.sleep(99)
""",
    "edits the tests' memory": """
import os
for i in os.listdir('/proc') if os.path.exists('/proc') else []:
    try:
        open(f'/proc/{i}/mem', 'r+b').write(b'x')
    except OSError:
        pass
    except ValueError:
        pass

def add(a, b):
    return 0
""",
    "what is built in": """
for name in ['all', 'map', 'abs', 'isinstance']:
    globals()[name] = lambda *a: True

def abs(a):
    return 0

def add(a, b):
    return 0
""",
    "main module": """
import sys
sys.modules['__main__'].add = lambda *a: 0
sys.modules['__main__'].__dict__.clear()
""",
}
"""programs without a right `add`, by the way in which they want to pass tests of it"""

UNIT_TESTS: dict[str, tuple[str, str, list[bool]]] = {
    "a right and a wrong assert": (
        """
def add(a, b):
    return a + b
""",
        """
assert add(1, 2) == 3
assert add(1, 2) == 4
""",
        [True, False],
    ),
    "comparisons without assert": (
        """
def add(a, b):
    return a + b
""",
        """
add(1, 2) == 3
add(1, 2) == 4
2 < add(1, 2) < 3
add(1, 2) == 3 and not add(1, 2) == 4
add(1, 2) == 3 and (add(1, 2) == 4 or add(1, 2) > 3)
def test_right():
    add(1, 2) == 3
    return False
def test_wrong():
    add(1, 2) != 3
add(1, -1)
add(1, 2) == 4 or add(1, -1)
""",
        [True, False, False, True, False, True, True, True, False],
    ),
    "comparisons without assert in blocks": (
        """
def add(a, b):
    return a + b
""",
        """
for a in (1, 2):
    add(a, 1) == a + 1
for a in (1, 2):
    add(a, 1) == 2
else:
    pass
if add(1, 1) == 3:
    pass
else:
    add(1, 1) == 3
with open('/dev/null'):
    add(1, 2) == 4
try:
    add(1, 'a') == 2
except TypeError:
    add(1, 2) == 3
try:
    add(1, 'a') == 2
except TypeError:
    add(1, 2) == 4
try:
    pass
finally:
    add(1, 2) == 4
def check(candidate, wanted):
    "Checks."
    candidate(1, 2) == wanted
check(add, 3)
check(add, 4)
while True:
    match add(1, 2):
        case 3:
            add(1, 2) == 4
    break
def test_right():
    for a in (1, 2):
        add(a, 1) == a + 1
def test_wrong():
    for a in (1, 2):
        add(a, 1) == 2
""",
        [True, False, False, False, True, False, False, True, False, False, True, False],
    ),
    "several comparisons without assert in one line": (
        """
def add(a, b):
    return a + b
""",
        """
add(1, 2) == 3, add(2, 2) == 4
add(1, 2) == 3, add(2, 2) == 5
add(1, 2) == 4,
[add(1, 2) == 3, (add(2, 2) == 4, not add(2, 2) == 4)]
(add(1, 2) == 3) & (add(2, 2) == 4)
(add(1, 2) == 3) & (add(2, 2) == 5)
(add(1, 2) == 4) | (add(2, 2) == 4) and not (add(1, 2) == 3) & (add(2, 2) == 5)
add(1, 2), add(2, 2) == 5
()
""",
        [True, False, False, False, True, False, True, True, True],
    ),
    "checked by a function": (
        """
def add(a, b):
    return a + b
""",
        """
def check(candidate):
    assert candidate(2, 2) == 4
check(add)
""",
        [True],
    ),
    "imported by another name": (
        """
def add(a, b):
    return a + b
""",
        """
from solution import add as plus

def test_a():
    assert plus(2, 2) == 4
""",
        [True],
    ),
    "imported as a module": (
        """
import math
count = 0

def add(a, b):
    global count
    count += 1
    return a + b
""",
        """
import solution
assert solution.add(2, 2) == 4
assert solution.count == 1
assert solution.math.pi == 3.141592653589793
assert not hasattr(solution, "missing")
assert not hasattr(solution, "__builtins__") or solution.__builtins__ is None
def test_within():
    import program as own
    from solution import add as plus
    assert own.add(1, 1) == plus(1, 1) == 2
def test_missing():
    from solution import missing
""",
        [True, True, True, True, True, True, False],
    ),
    "imported as a module that ends loops": (
        """
import sys

def stop(*a):
    raise StopIteration
sys.modules['rlx.rewards.sandbox.inside.program'].ProgramSide._global = stop

def add(a, b):
    return 0
""",
        """
import solution
assert all(map(lambda x: solution.add(x, 1) == x + 1, [1, 2]))
""",
        [False],
    ),
    "called as what is built in": (
        """
def sum(a, b):
    return a + b
""",
        """
assert sum(1, 2) == 3
assert sum(1, 2) == 4
def test_sum():
    assert sum(2, 2) == 4
""",
        [True, False, True],
    ),
    "imported as what is built in": (
        """
def sum(a, b):
    return a + b

def abs(a):
    return 0

def all(a):
    return True
""",
        """
from solution import sum, abs as size
assert abs(sum(1, 2) - 3) < 1e-9
assert abs(sum(1, 2) - 4) < 1e-9
assert all([sum(1, 2) == 3, size(5) == 0])
assert all([sum(1, 2) == 4])
assert sum(1, 2) == 3 and size(5) == 5
""",
        [True, False, True, False, False],
    ),
    "one that is built in and calls what is imported": (
        """
def eval(a):
    return 3

def add(a, b):
    return 0
""",
        """
from solution import add
assert eval("add(1, 2)") == 3
""",
        [False],
    ),
    "one that is built in beside what is not": (
        """
def len(a):
    return 2

def words(a):
    return a.split()
""",
        """
words = words('a b c')
assert len(words) == 3
assert len(words) == 2
""",
        [True, False],
    ),
    "in a loop": (
        """
def add(a, b):
    return a + b
""",
        """
import math
for i in range(9):
    assert math.isclose(add(i, 0.1), i + 0.1)
""",
        [True],
    ),
    "arguments that are changed": (
        """
def f(x):
    x.append(1)
    x[0].add(2)
""",
        """
a = [set()]
f(a)
assert a == [{2}, 1]
""",
        [True, True],
    ),
    "a function of the tests": (
        """
def f(g, x):
    return g(g(x))
""",
        """
assert f(lambda x: x * 3, 2) == 18
""",
        [True],
    ),
    "a generator": (
        """
def f(x):
    for i in range(x):
        yield i
""",
        """
assert list(f(3)) == [0, 1, 2]
""",
        [True],
    ),
    "an expected exception": (
        """
def f(x):
    raise KeyError(x)
""",
        """
try:
    f(1)
except KeyError:
    pass
else:
    assert 0
""",
        [True],
    ),
    "an object with methods": (
        """
class S:

    def __init__(s):
        s.x = []

    def push(s, v):
        s.x.append(v)

    def pop(s):
        return s.x.pop()
""",
        """
s = S()
s.push((1, 'a'))
assert s.x == [(1, 'a')]
assert s.pop() == (1, 'a')
""",
        [True, True, True],
    ),
    "what Python asks an object": (
        """
import contextlib

class P:

    def __init__(s, x):
        s.x, s.log = x, []

    def __repr__(s):
        return f"P({s.x})"

    def __enter__(s):
        s.log.append('in')
        return s

    def __exit__(s, kind, error, trace):
        s.log.append(kind is not None)

class Q(P):
    pass

@contextlib.contextmanager
def g():
    yield 5
""",
        """
p = Q(1)
assert repr(p) == str(p) == 'P(1)' and f'{[p]}' == '[P(1)]'
assert repr(p) == 'P(2)'
assert isinstance(p, P) and isinstance(p, (int, Q)) and issubclass(Q, P)
assert not isinstance(P(1), Q) and not isinstance(1, P) and not issubclass(P, Q)
with p as q:
    assert q.x == 1
with p as q:
    assert q.x == 2
assert p.log == ['in', False, 'in', True]
with g() as five:
    assert five == 5
with g() as five:
    assert five == 6
with P:
    pass
""",
        [True, False, True, True, True, False, True, True, False, False],
    ),
    "managers that suppress": (
        """
class S:

    def __enter__(s):
        return 1

    def __exit__(s, *a):
        return True

class R(S):

    def __exit__(s, *a):
        raise KeyError
""",
        """
with S() as x:
    assert x == 2
try:
    with R():
        assert 0
except KeyError:
    pass
with R():
    pass
""",
        [False, False, False],
    ),
    "operators that see what is expected": (
        """
class E:

    def __sub__(s, o):
        return 0
    __rsub__ = __add__ = __mul__ = __sub__

    def __lt__(s, o):
        return True
    __gt__ = __le__ = __ge__ = __contains__ = __eq__ = __lt__

    def __hash__(s):
        return 0

def add(a, b):
    return E()
""",
        """
assert abs(add(1, 2) - 3) < 1
assert abs(3 - add(1, 2)) < 1
assert add(1, 2) < 4
assert add(1, 2) >= add(1, 2)
assert 3 in add(1, 2)
assert add(1, 2) in {add(1, 2)}
assert isinstance(add(1, 2), int)
""",
        [False] * 7,
    ),
    "linked objects": (
        """
class N:

    def __init__(s, v, n=None):
        s.v, s.n = (v, n)

def f(n):
    return f(n.n) + n.v if n else 0
""",
        """
assert f(N(1, N(2))) == 3
n = N(1)
n.n = N(5)
assert n.n.v == 5
""",
        [True, True],
    ),
    "values of many types": (
        """
from decimal import Decimal

def f():
    return {1: Decimal('1.50'), b'x': 1j, None: frozenset({(1,)})}
""",
        """
from decimal import Decimal
assert f() == {1: Decimal('1.5'), b'x': 1j, None: frozenset({(1,)})}
""",
        [True],
    ),
    "a subclass of dict": (
        """
import collections

def f():
    return collections.Counter('aab')
""",
        """
assert f() == {'a': 2, 'b': 1}
""",
        [True],
    ),
    "a constant of a module": (
        """
import math

def f(x):
    return x
""",
        """
assert f(math.pi) == math.pi
""",
        [True],
    ),
    "unittest that passes": (
        """
def add(a, b):
    return a + b
""",
        """
import unittest

class T(unittest.TestCase):

    def test(self):
        self.assertEqual(add(1, 1), 2)
if __name__ == '__main__':
    unittest.main()
""",
        [True],
    ),
    "unittest that fails": (
        """
def add(a, b):
    return a + b
""",
        """
import unittest

class T(unittest.TestCase):

    def test(self):
        self.assertEqual(add(1, 1), 3)
if __name__ == '__main__':
    unittest.main()
""",
        [False],
    ),
    "another function": (
        """
def sub(a, b):
    return a - b
""",
        """
assert add(1, 2) == 3
""",
        [False],
    ),
    "no Python in the program": (
        """
def f(:
""",
        """
assert f() == 3
assert f() == 4
""",
        [False, False],
    ),
    "no Python in the tests": (
        """
def add(a, b):
    return a + b
""",
        """
def f(:
""",
        [],
    ),
    "no tests": (
        """
def add(a, b):
    return a + b
""",
        """
x = add(1, 1)
""",
        [],
    ),
}
"""(program, its tests, which of them pass), by name"""
