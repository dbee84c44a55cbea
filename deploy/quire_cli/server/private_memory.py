"""Makes a server's shared memory unreadable for other users of the machine from the moment it is created.

tritonserver makes a region in /dev/shm for each stub, for prompts, answers and the introspection token, and lets every
user read it, in two steps (seen with strace)::

    openat("/dev/shm/quire-…", O_CREAT|O_EXCL|…, 0644)     less what the umask says: 0600
    fchmod(fd, 0644)                                       which ignores the umask, and whose failure is ignored

The Python backend leaves the mode to Boost, whose default that is: it is not the fault of one release. The model's own
code removes these permissions again (`quire_backend.private_memory`), but a second later: a process that watches
/dev/shm has opened the region by then. So the server runs with a umask of 077, and with a seccomp filter that lets
`fchmod(…, 0644)` succeed without any effect.
"""

import ctypes
import os
import platform
import struct
from collections.abc import Sequence

_UMASK = 0o077
_OPEN_TO_ALL = 0o644

# By machine: its number in a filter's data, and the numbers of the system calls fchmod and seccomp.
_MACHINES = {"x86_64": (0xC000003E, 91, 317), "aarch64": (0xC00000B7, 52, 277)}
_PR_SET_NO_NEW_PRIVS = 38
_SECCOMP_SET_MODE_FILTER = 1
# Older kernels would otherwise turn on slow mitigations for everything that the server and the engine compute.
_SECCOMP_FILTER_FLAG_SPEC_ALLOW = 4

# Instructions of classic BPF, and the offsets of what they read in a system call's data.
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_NUMBER_AT, _MACHINE_AT, _SECOND_ARGUMENT_AT = 0, 4, 24
_ALLOW, _ANSWER_SUCCESS = 0x7FFF0000, 0x00050000

_libc = ctypes.CDLL(None, use_errno=True)


class _Program(ctypes.Structure):
    """A filter in the kernel's form."""

    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def keep_memory_private() -> bool:
    """Call it in a new child, before it becomes the server: what it and its children create is for this user alone.

    Returns:
        False if the kernel or the machine has no such filters: then the regions are readable until the model's code has
        changed that.
    """
    os.umask(_UMASK)
    machine = _MACHINES.get(platform.machine())
    if machine is None:
        return False
    architecture, fchmod, seccomp = machine
    program = _assemble([
        (_LOAD, 0, 0, _MACHINE_AT),
        (_JUMP_IF_EQUAL, 0, 5, architecture),
        (_LOAD, 0, 0, _NUMBER_AT),
        (_JUMP_IF_EQUAL, 0, 3, fchmod),
        (_LOAD, 0, 0, _SECOND_ARGUMENT_AT),
        (_JUMP_IF_EQUAL, 0, 1, _OPEN_TO_ALL),
        (_RETURN, 0, 0, _ANSWER_SUCCESS),
        (_RETURN, 0, 0, _ALLOW),
    ])  # fmt: skip

    def is_set() -> bool:
        flags = _SECCOMP_FILTER_FLAG_SPEC_ALLOW
        return bool(_libc.syscall(seccomp, _SECCOMP_SET_MODE_FILTER, flags, ctypes.byref(program)) == 0)

    # Without CAP_SYS_ADMIN a filter can only be set by giving up setuid programs, such as a driver's, for all
    # descendants.
    return is_set() or (_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 and is_set())


def _assemble(instructions: Sequence[tuple[int, int, int, int]]) -> _Program:
    """Instructions as (code, how many to skip if true, if false, operand)."""
    code = b"".join(struct.pack("=HBBI", *instruction) for instruction in instructions)
    return _Program(len(instructions), code)
