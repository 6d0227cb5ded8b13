"""A world of its own for a program: other processes, files, users and networks than those of the machine.

The kernel allows that without root on many machines, and refuses it in many containers. Inside, the program sees the
Python that runs it, /usr, a few devices and one folder, and no other process. It has a network without any way out.
Left out: limits on time and memory, and calls of the kernel that a program has no use for.
"""

from __future__ import annotations

import os
import re
import stat
import sys
from contextlib import suppress

from rlx.rewards.sandbox import kernel
from rlx.rewards.sandbox.kernel import MS_BIND, MS_NODEV, MS_NOEXEC, MS_NOSUID, MS_PRIVATE, MS_RDONLY, MS_REC

FOLDER, LIBRARY = "/sandbox", "/library"
"""the only folder that a program can write to, made anew for each test; a copy of rlx.rewards.sandbox.inside"""
MAX_FILES = 1024
"""files and folders that it holds"""
_NEW_MOUNTS, _NEW_CGROUP, _NEW_UTS, _NEW_IPC = 0x20000, 0x2000000, 0x4000000, 0x8000000
_NEW_USER, _NEW_PID, _NEW_NETWORK = 0x10000000, 0x20000000, 0x40000000
_ALL = _NEW_MOUNTS | _NEW_CGROUP | _NEW_UTS | _NEW_IPC | _NEW_USER | _NEW_PID | _NEW_NETWORK
_NOBODY = 64_242  # user and group outside whom a program of root's is; on few machines is that a person
_SYSTEM = ("/usr", "/bin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_ROOT_OPTIONS = "size=4m,nr_inodes=4096,mode=755"


def visible() -> list[str]:
    """Files and folders of the machine that a program may read: Python with its library, and the system's programs."""
    return [*_SYSTEM, *sorted({os.path.realpath(path) for path in (sys.base_prefix, sys.base_exec_prefix)})]


def enter(library: str) -> None:
    """Goes on in a new process, the first of new namespaces; the calling process waits for it and ends as it does.

    Args:
        library: the folder that the program finds at LIBRARY.

    Raises:
        OSError: the kernel does not allow it.
    """
    _enter_user()
    if child := os.fork():
        os._exit(min(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) % 256, 255))
    kernel.end_with_parent()
    _build_root(library)


def _enter_user() -> None:
    """Unshares, and becomes the first user of the new user namespace, who may do everything in it."""
    parent = os.getpid()
    waits, goes = os.pipe()
    helper = os.fork()  # stays outside, where root may map a second user: limits on processes do not bind root itself
    if not helper:
        os.close(goes)
        os.read(waits, 1)
        os._exit(0 if _map_two_users(parent) else 1)
    try:
        kernel.unshare(_ALL)
    finally:
        os.close(waits)
        os.close(goes)
        _, status = os.waitpid(helper, 0)
    if status:
        _map_one_user()
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)


def _map_two_users(process: int) -> bool:
    if os.geteuid():
        return False
    with suppress(OSError):
        for name in ("uid_map", "gid_map"):
            _write(f"/proc/{process}/{name}", f"0 0 1\n1 {_NOBODY} 1\n")
        return True
    return False


_OUTSIDE = (os.geteuid(), os.getegid())


def _map_one_user() -> None:
    _write("/proc/self/setgroups", "deny")
    for name, number in zip(("uid_map", "gid_map"), _OUTSIDE, strict=True):
        _write(f"/proc/self/{name}", f"0 {number} 1\n")


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def leave_user() -> bool:
    """Becomes the second user of the namespace if there is one and Python is readable for everybody.

    Returns:
        Whether this process is now a user of its own, whose processes the kernel counts from 0.
    """
    open_to_all = stat.S_IROTH | stat.S_IXOTH
    if any(~os.stat(path).st_mode & open_to_all for path in (sys.base_prefix, os.path.realpath(sys.executable))):
        return False
    try:
        os.setgroups([])
        os.setresgid(1, 1, 1)
        os.setresuid(1, 1, 1)
    except OSError:
        return False
    return True


def counts_processes() -> bool:
    """Whether the kernel counts the processes of a user in each user namespace apart: Linux 5.14 and later."""
    version = re.match(r"(\d+)\.(\d+)", os.uname().release)
    return version is not None and (int(version[1]), int(version[2])) >= (5, 14)


def _build_root(library: str) -> None:
    """A root with nothing but the visible paths, read-only, and an empty folder in memory."""
    os.umask(0o022)
    kernel.mount(None, "/", None, MS_REC | MS_PRIVATE)
    kernel.mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, _ROOT_OPTIONS)
    os.mkdir("/tmp/machine")
    kernel.pivot_root("/tmp", "/tmp/machine")
    os.chdir("/")
    for path in visible():
        _show(path, path, MS_RDONLY | MS_NOSUID | MS_NODEV)
    for path in _DEVICES:
        _show(path, path, MS_NOSUID | MS_NOEXEC)
    _show(library, LIBRARY, MS_RDONLY | MS_NOSUID | MS_NODEV)
    os.makedirs("/proc")
    kernel.mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    for link, target in {"/dev/fd": "/proc/self/fd", "/dev/shm": FOLDER, "/tmp": FOLDER}.items():
        if not os.path.lexists(link):
            os.symlink(target, link)
    os.mkdir(FOLDER)
    kernel.unmount("/machine")
    os.rmdir("/machine")
    kernel.mount(None, "/", None, kernel.MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)


def _show(source: str, path: str, attributes: int) -> None:
    source = f"/machine{source}"
    if os.path.lexists(path) or not os.path.lexists(source):  # within a folder that is shown already, or nowhere
        return
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if os.path.islink(source):
        return os.symlink(os.readlink(source), path)
    if os.path.isdir(source):
        os.mkdir(path)
    else:
        _write(path, "")
    kernel.bind(source, path, attributes)


def empty_folder(size: int) -> None:
    """Replaces FOLDER by an empty one that holds so many bytes."""
    with suppress(OSError):  # of the first test
        kernel.unmount(FOLDER)
    kernel.mount("tmpfs", FOLDER, "tmpfs", MS_NOSUID | MS_NODEV, f"size={size},nr_inodes={MAX_FILES},mode=1777")
