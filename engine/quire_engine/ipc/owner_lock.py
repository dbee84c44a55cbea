"""OwnerLock: a lock that a process holds while it lives, so that others learn of its death at once.

The kernel reports a process's end to its parent when the memory has been freed: after 30 ms with a KV cache of 256 MiB,
after 90 ms with 1 GiB; files, such as a GPU's, are closed before that, too. A robust lock is released first of all, and
a waiting process is woken after 0.1 ms. (pthread_mutex calls `set_robust_list`; where a kernel or a C library has none,
only the process's end is seen.)

::

    holder    hold() ───────── lives ───────── is killed
    waiter    wait() ······· False, False ········ True
"""

import ctypes
import errno
import time
from collections.abc import Callable

LOCK_BYTES = 64
"""A pthread_mutex_t has 40 on x86-64, and 48 on ARM."""
_ATTRIBUTE_BYTES = 64
_libc = ctypes.CDLL(None)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class OwnerLock:
    """One process's view.

    Args:
        memory: shared, and zero at first; the lock takes `LOCK_BYTES` of it.
        offset: where, a multiple of 8.
        is_new: whether to initialise it.

    Raises:
        OSError: the C library has no such locks.
    """

    def __init__(self, memory: memoryview, offset: int, is_new: bool) -> None:
        self._buffer = (ctypes.c_char * LOCK_BYTES).from_buffer(memory, offset)
        if is_new:
            attributes = ctypes.create_string_buffer(_ATTRIBUTE_BYTES)
            _check(_libc.pthread_mutexattr_init, attributes)
            _check(_libc.pthread_mutexattr_setpshared, attributes, 1)
            _check(_libc.pthread_mutexattr_setrobust, attributes, 1)
            _check(_libc.pthread_mutex_init, self._buffer, attributes)

    def hold(self) -> None:
        """Hold it until the process ends. The calling thread must not end before.

        Raises:
            OSError: another process holds it, or did.
        """
        _check(_libc.pthread_mutex_trylock, self._buffer)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._buffer))  # the kernel reads it when all objects are gone

    def wait(self, seconds: float) -> bool | None:
        """Wait until the holder ends, for so long at most.

        Returns:
            Whether it has ended; None if there is no holder, or its end was reported before.
        """
        nanoseconds = time.time_ns() + int(1e9 * seconds)
        deadline = _Timespec(nanoseconds // 1_000_000_000, nanoseconds % 1_000_000_000)
        result = _libc.pthread_mutex_timedlock(self._buffer, ctypes.byref(deadline))
        if result == errno.ETIMEDOUT:
            return False
        if result not in (0, errno.EOWNERDEAD):
            return None
        _libc.pthread_mutex_unlock(self._buffer)
        return True if result == errno.EOWNERDEAD else None

    def close(self) -> None:
        """Release the memory. No thread may wait any more."""
        del self._buffer


def _check(function: "Callable[..., int]", *arguments: object) -> None:
    result = function(*arguments)
    if result:
        raise OSError(result, f"{function.__name__}: {errno.errorcode.get(result, result)}")
