"""Shuts files and TCP by Landlock, which needs no privileges (Linux 5.13 and later; TCP from 6.7 on).

Left out: what Landlock cannot shut, which `seccomp` does: other networks, and changing owners and modes of files.
Numbers are those of Linux' uapi/linux/landlock.h.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence

from rlx.rewards.sandbox import kernel

_CREATE, _ADD_RULE, _RESTRICT = 444, 445, 446
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _TRUNCATE, _DEVICE = 1, 2, 4, 8, 1 << 14, 1 << 15
_READ = _EXECUTE | _READ_FILE | _READ_DIR
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _DEVICE  # rights that a rule for a file may name
_LAST_BIT = {1: 12, 2: 13, 3: 14, 4: 14}  # of the rights to files, by version; 15 from version 5 on
_PATH_BENEATH = 1
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")


def version() -> int:
    """The version of Landlock that the kernel has; 0: none."""
    try:
        return kernel.syscall(_CREATE, None, 0, 1)
    except OSError:
        return 0


def shut_files(readable: Sequence[str], writable: Sequence[str]) -> None:
    """Takes all files but these from this process and what it executes, and TCP.

    Files may be read and executed that are named or lie below a named folder, and written below the second ones.

    Raises:
        OSError: the kernel has no Landlock.
    """
    number = version()
    rights = (2 << _LAST_BIT.get(number, 15)) - 1
    tcp, scopes = 3, 3  # bind and connect; abstract sockets and signals
    fields = [rights, *([tcp] if number >= 4 else []), *([scopes] if number >= 6 else [])]
    attributes = struct.pack(f"={len(fields)}Q", *fields)
    ruleset = kernel.syscall(_CREATE, attributes, len(attributes), 0)
    for path in readable:
        _allow(ruleset, path, _READ & rights)
    for path in writable:
        _allow(ruleset, path, rights & ~_DEVICE)
    for path in _DEVICES:
        _allow(ruleset, path, _READ_FILE | _WRITE_FILE)
    kernel.forbid_new_privileges()
    kernel.syscall(_RESTRICT, ruleset, 0)
    os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        file = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        allowed = rights if os.path.isdir(path) else rights & _OF_FILES
        rule = struct.pack("=Qi", allowed, file)
        kernel.syscall(_ADD_RULE, ruleset, _PATH_BENEATH, rule, 0)
    finally:
        os.close(file)
