"""Calls of the C library and of the kernel that Python has no function for.

Left out: what they are good for; `namespaces`, `landlock` and `seccomp` say that. Numbers are those of Linux' headers
(uapi/linux/mount.h, prctl.h, capability.h, sched.h).
"""

from __future__ import annotations

import ctypes
import os
import struct
from contextlib import suppress

_LIBC = ctypes.CDLL(None, use_errno=True)
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 32, 4096, 16384, 1 << 18
_MNT_DETACH = 2
_PDEATHSIG, _DUMPABLE, _CAPBSET_DROP, _NO_NEW_PRIVS, _CAP_AMBIENT = 1, 4, 24, 38, 47
_CLEAR_ALL = 4  # of _CAP_AMBIENT
_CAPABILITY_VERSION = 0x20080522
_MOUNT_SETATTR, _PIVOT_ROOT = 442, {"x86_64": 155, "aarch64": 41}
_AT_RECURSIVE, _AT_FDCWD = 0x8000, -100


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def syscall(number: int, *arguments: object) -> int:
    """What a call of the kernel returns; OSError if it fails."""
    converted = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
    return _checked(_LIBC.syscall(ctypes.c_long(number), *converted), f"system call {number}")


def prctl(option: int, *arguments: int) -> None:
    """Sets something of this process; OSError if it fails."""
    values = [ctypes.c_ulong(each) for each in (*arguments, 0, 0, 0, 0)[:4]]
    _checked(_LIBC.prctl(ctypes.c_int(option), *values), f"prctl {option}")


def unshare(flags: int) -> None:
    """Moves this process into new namespaces; OSError if the kernel does not allow it."""
    _checked(_LIBC.unshare(ctypes.c_int(flags)), "unshare")


def mount(source: str | None, target: str, kind: str | None, flags: int, options: str = "") -> None:
    """Mounts a file system, or changes a mount."""
    texts = [None if text is None else text.encode() for text in (source, target, kind)]
    _checked(_LIBC.mount(*texts, ctypes.c_ulong(flags), options.encode()), f"mount {target}")


def unmount(target: str) -> None:
    """Takes a mount away, also one that is in use."""
    _checked(_LIBC.umount2(target.encode(), _MNT_DETACH), f"umount {target}")


def bind(source: str, target: str, attributes: int) -> None:
    """Shows a file or folder at a second place, with MS_ attributes for all mounts below it."""
    mount(source, target, None, MS_BIND | MS_REC)
    wanted = struct.pack("=4Q", attributes, 0, 0, 0)  # struct mount_attr; its first four bits are those of MS_
    try:
        syscall(_MOUNT_SETATTR, _AT_FDCWD, target.encode(), _AT_RECURSIVE, wanted, len(wanted))
    except OSError:  # before Linux 5.12
        mount(None, target, None, MS_REMOUNT | MS_BIND | attributes)


def pivot_root(new: str, old: str) -> None:
    """Makes a mount the root of this process, and shows the former root below it."""
    syscall(_PIVOT_ROOT[os.uname().machine], new.encode(), old.encode())


def end_with_parent() -> None:
    """The kernel ends this process when the process that forked it ends."""
    prctl(_PDEATHSIG, 9)


def hide_memory() -> None:
    """No process without privileges may read this process' memory, environment or open files."""
    prctl(_DUMPABLE, 0)


def bound_capabilities() -> None:
    """What this process executes gets no privileges, not even as root."""
    prctl(_CAP_AMBIENT, _CLEAR_ALL)
    with suppress(OSError):  # there is no such capability, or there was no privilege to begin with
        for capability in range(64):
            prctl(_CAPBSET_DROP, capability)


def drop_capabilities() -> None:
    """Takes every privilege from this process."""
    header, none = struct.pack("=Ii", _CAPABILITY_VERSION, 0), struct.pack("=6I", *[0] * 6)
    _checked(_LIBC.capset(header, none), "capset")


def forbid_new_privileges() -> None:
    """Files with the set-user-ID bit or capabilities of their own give none to this process from now on."""
    prctl(_NO_NEW_PRIVS, 1)
