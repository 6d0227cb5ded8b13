"""A filter for calls of the kernel, which needs no privileges: what is not allowed fails as if it were forbidden.

It shuts networks, other processes, and parts of the kernel that no program of a task needs and that errors of the
kernel have been in. Left out: files, which namespaces or Landlock shut.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rlx.rewards.sandbox import kernel

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # uapi/linux/audit.h
_LOAD, _EQUAL, _ABOVE, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # instructions of uapi/linux/bpf_common.h
_ALLOW, _ERROR = 0x7FFF0000, 0x00050000
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16  # in struct seccomp_data; arguments have 8 bytes
_SET_SECCOMP, _FILTER = 22, 2  # of prctl
_OTHER_ABI = 0x40000000  # numbers from here on are calls of x32

NUMBERS: dict[str, tuple[int | None, int | None]] = {
    "socket": (41, 198),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "open_by_handle_at": (304, 265),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_setup": (206, 0),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "fanotify_init": (300, 262),
    "syslog": (103, 116),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "kexec_load": (246, 104),
    "reboot": (169, 142),
    "swapon": (167, 224),
}
"""calls that no program may make, with their numbers on x86_64 and aarch64"""
ALONE: dict[str, tuple[int | None, int | None]] = {
    "fork": (57, None),
    "vfork": (58, None),
    "kill": (62, 129),
    "tkill": (200, 130),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424),
    "setpriority": (141, 140),
    "ioprio_set": (251, 30),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_setattr": (314, 274),
    "sched_setaffinity": (203, 122),
    "truncate": (76, 45),
    "chmod": (90, None),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, None),
    "lchown": (94, None),
    "fchown": (93, 55),
    "fchownat": (260, 54),
    "utime": (132, None),
    "utimes": (235, None),
    "futimesat": (261, None),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "setxattrat": (463, 463),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "removexattrat": (466, 466),
    "file_setattr": (469, 469),
}
"""calls that no program may make, too, where other processes and their files are within reach: no namespaces"""
_CLONE, _CLONE3, _TGKILL, _PRLIMIT = (56, 220), (435, 435), (234, 131), (302, 261)
_FCNTL, _IOCTL, _PRCTL = (72, 25), (16, 29), (157, 167)
_NAMESPACES, _THREAD = 0x7E020080, 0x10000  # flags of clone
_SET_DEATH_SIGNAL = 1  # of prctl: by it the program ends with its launcher
_SET_OWNER = (8, 15)  # of fcntl: whom a file sends signals to
_SET_OWNER_OF_SOCKET = (0x8901, 0x8902)  # of ioctl


class Instruction(NamedTuple):
    """One instruction of the filter."""

    code: int
    if_true: int  # instructions to skip
    if_false: int
    value: int


def program(alone: bool) -> list[Instruction]:
    """The filter for this machine.

    Args:
        alone: the program gets no other process than itself, and may send signals to nobody else.

    Raises:
        OSError: the numbers of the calls of this machine are not known here.
    """
    machine = os.uname().machine
    if machine not in _ARCHITECTURES:
        raise OSError(errno.ENOSYS, f"no filter for {machine}")
    column = list(_ARCHITECTURES).index(machine)
    rows = [*NUMBERS.values(), *(ALONE.values() if alone else ())]
    return [
        Instruction(_LOAD, 0, 0, _ARCHITECTURE_AT),
        Instruction(_EQUAL, 1, 0, _ARCHITECTURES[machine]),
        _refuse(),
        Instruction(_LOAD, 0, 0, _NUMBER_AT),
        Instruction(_ABOVE, 0, 1, _OTHER_ABI),
        _refuse(),
        *[step for row in rows if (number := row[column]) is not None for step in _never(number)],
        *_never(_CLONE3[column], errno.ENOSYS),  # its flags are in memory; the C library calls clone instead
        *_where(_CLONE[column], 0, [Instruction(_ANY_BIT, 0, 1, _NAMESPACES)]),
        *(_alone(column) if alone else ()),
        Instruction(_RETURN, 0, 0, _ALLOW),
    ]


def _alone(column: int) -> Iterator[Instruction]:
    yield from _where(_CLONE[column], 0, [Instruction(_ANY_BIT, 1, 0, _THREAD)])
    yield from _where(_TGKILL[column], 0, [Instruction(_EQUAL, 1, 0, os.getpid())])
    own = [Instruction(_EQUAL, 2, 0, 0), Instruction(_EQUAL, 1, 0, os.getpid())]
    yield from _where(_PRLIMIT[column], 0, own)
    yield from _where(_PRCTL[column], 0, [Instruction(_EQUAL, 0, 1, _SET_DEATH_SIGNAL)])
    for number, values in ((_FCNTL[column], _SET_OWNER), (_IOCTL[column], _SET_OWNER_OF_SOCKET)):
        for value in values:
            yield from _where(number, 1, [Instruction(_EQUAL, 0, 1, value)])


def _refuse(error: int = errno.EPERM) -> Instruction:
    return Instruction(_RETURN, 0, 0, _ERROR | error)


def _never(number: int, error: int = errno.EPERM) -> list[Instruction]:
    return [Instruction(_EQUAL, 0, 1, number), _refuse(error)]


def _where(number: int, argument: int, tests: Sequence[Instruction]) -> list[Instruction]:
    """Refuses a call if the tests of the lower half of an argument lead to the instruction after them."""
    body = [Instruction(_LOAD, 0, 0, _ARGUMENTS_AT + 8 * argument), *tests, _refuse()]
    body.append(Instruction(_LOAD, 0, 0, _NUMBER_AT))
    return [Instruction(_EQUAL, 0, len(body), number), *body]


def filter_calls(alone: bool) -> None:
    """Filters the calls of this process and of what it executes from now on.

    Raises:
        OSError: the kernel has no filters, or the machine is unknown.
    """
    steps = program(alone)
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in steps))
    header = ctypes.create_string_buffer(struct.pack("@HP", len(steps), ctypes.addressof(code)))
    kernel.forbid_new_privileges()
    kernel.prctl(_SET_SECCOMP, _FILTER, ctypes.addressof(header))
