"""Keeps what a trial's process does apart: it writes no file outside its folder, and reaches no other machine.

Two layers. Linux' Landlock, where the kernel has it, holds for everything in this process and those that it starts, C++ and Rust too.
An audit hook sees what Python does, on every system: it refuses connections, which Landlock cannot tell by address, says what was
refused, and makes copies of linked files when they are about to be written. What neither holds is said (`unkept`).
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

from gradguard.core.foreign_exceptions import internal_error
from gradguard.runtime.trials.mirror import unlinked

Note = Callable[[str, str], None]  # of a kind ("refused", "unkept") and a text

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_FREE = ("/dev/", "/proc/")
_LARGEST_COPY = 256 << 20
# events about a path that is changed itself (a link is removed, not what it leads to): which arguments are paths, and their dir_fd
_CHANGING: dict[str, tuple[tuple[int, int | None], ...]] = {
    "os.remove": ((0, 1),), "os.rmdir": ((0, 1),), "os.mkdir": ((0, 2),), "os.truncate": ((0, None),), "os.rename": ((0, 2), (1, 3)),
    "os.link": ((1, 3),), "os.symlink": ((1, 2),), "os.chmod": ((0, 2),), "os.chown": ((0, 3),), "os.utime": ((0, 3),),
    "os.setxattr": ((0, None),), "os.mkfifo": ((0, None),), "os.mknod": ((0, None),),
}  # fmt: skip
_CONNECTING = {"socket.connect": 1, "socket.sendto": 1, "socket.sendmsg": 1, "socket.getaddrinfo": 0, "socket.gethostbyname": 0}
_STARTING = {"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn"}


def confine(folder: str, note: Note) -> None:
    """Confines this process for the rest of its life, which ends with that of the process that started it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
    held = _landlock(folder)
    sys.addaudithook(_Hook(folder, held, note))
    _announce_torch_save()


class _Hook:
    """The audit hook."""

    def __init__(self, folder: str, held: bool, note: Note) -> None:
        self._inside = os.path.join(os.path.realpath(folder), "")
        self._held = held
        self._note = note
        self._told: set[str] = set()
        self._own = threading.local()  # what the hook itself does is not its concern

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event != "open" and event not in _CHANGING and event not in _CONNECTING and event not in _STARTING:
            return
        if getattr(self._own, "busy", False):
            return
        self._own.busy = True
        try:
            if event == "open":
                self._open(*arguments)
            elif event in _CHANGING:
                for path, folder in _CHANGING[event]:
                    self._change(arguments[path], arguments[folder] if folder is not None and folder < len(arguments) else -1)
            elif event in _CONNECTING:
                self._connect(arguments[_CONNECTING[event]])
            else:
                self._start(event, arguments)
        finally:
            self._own.busy = False

    def _open(self, path: Any, mode: Any, flags: Any) -> None:
        if not isinstance(path, (str, bytes)) or not isinstance(flags, int) or not flags & _WRITING:
            return
        name = os.path.abspath(os.fsdecode(path))
        if self._is_free(os.path.realpath(name)):
            return
        if not name.startswith(self._inside) or not self._own_copy(name, keep=not flags & os.O_TRUNC):
            self._refuse(f"writing {name}")

    def _change(self, path: Any, folder: Any) -> None:
        if not isinstance(path, (str, bytes)):
            return
        name = os.fsdecode(path)
        if isinstance(folder, int) and folder >= 0 and not os.path.isabs(name):
            try:
                name = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), name)
            except internal_error(OSError):
                if self._held:
                    return
        name = os.path.abspath(name)
        parent, last = os.path.split(name)
        if self._is_free(os.path.join(os.path.realpath(parent), last)):
            return
        if not name.startswith(self._inside):
            self._refuse(f"changing {name}")
        unlinked(self._inside, parent)

    def _is_free(self, real: str) -> bool:
        return real.startswith((self._inside, *_FREE))

    def _own_copy(self, name: str, keep: bool) -> bool:
        """Puts a copy in the place of a link that leads out of the trial's folder."""
        unlinked(self._inside, os.path.dirname(name))
        if not os.path.islink(name):
            return True
        real = os.path.realpath(name)
        size = os.path.getsize(real) if keep and os.path.isfile(real) else 0
        if size > _LARGEST_COPY:
            return False
        os.unlink(name)
        if keep and os.path.isfile(real):
            shutil.copyfile(real, name)
        return True

    def _connect(self, address: Any) -> None:
        host = address[0] if isinstance(address, tuple) and address else address
        if isinstance(address, tuple) or isinstance(host, str):
            host = os.fsdecode(host) if isinstance(host, bytes) else host
            own = ("", "localhost", "::1", "0.0.0.0", "::", platform.node())
            if isinstance(host, str) and host not in own and not host.startswith(("127.", "/")):
                self._refuse(f"a connection to {host}", ConnectionError)

    def _start(self, event: str, arguments: tuple[Any, ...]) -> None:
        program = os.path.basename(str(arguments[0])) if arguments else event
        if not self._held:
            self._refuse(f"starting {program}")
        self._say("unkept", f"the network of {program}, which the program starts")

    def _refuse(self, what: str, kind: type[OSError] = PermissionError) -> None:
        self._say("refused", what)
        raise kind(errno.EPERM if kind is PermissionError else errno.ENETUNREACH, f"gradguard: a trial must not do this: {what}")

    def _say(self, kind: str, text: str) -> None:
        if text not in self._told and len(self._told) < 50:
            self._told.add(text)
            self._note(kind, text)


def _announce_torch_save() -> None:
    """`torch.save` opens its file in C++, which no audit hook sees: it is announced as Python's own `open` is."""
    import torch.serialization

    serialization: Any = torch.serialization
    original = getattr(serialization, "_open_zipfile_writer", None)
    if original is None:
        return

    def announced(target: Any) -> Any:
        if isinstance(target, (str, os.PathLike)):
            sys.audit("open", os.fspath(target), "wb", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        return original(target)

    serialization._open_zipfile_writer = announced


# -- Landlock (the same system call numbers on every architecture) --------------------------------------------------------

_CREATE, _ADD, _RESTRICT = 444, 445, 446
_DIE_WITH_PARENT, _NO_NEW_PRIVILEGES = 1, 38
_WRITES = sum(1 << bit for bit in (1, 4, 5, 6, 7, 8, 9, 10, 11, 12))  # write, remove and make files of every kind
_REFER, _TRUNCATE = 1 << 13, 1 << 14
_FILE_RIGHTS = 1 << 1 | _TRUNCATE


def can_hold() -> bool:
    """Whether this system's kernel can keep a process from writing."""
    return _abi() > 0


def _abi() -> int:
    if sys.platform != "linux":
        return 0
    try:
        return max(0, int(ctypes.CDLL(None, use_errno=True).syscall(_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint32(1))))
    except internal_error():
        return 0


def _landlock(folder: str) -> bool:
    """Lets this process write below `folder` and to devices only; False where the kernel cannot do that."""
    abi = _abi()
    if not abi:
        return False
    call = ctypes.CDLL(None, use_errno=True).syscall
    handled = _WRITES | (_REFER if abi >= 2 else 0) | (_TRUNCATE if abi >= 3 else 0)
    attributes = ctypes.c_uint64(handled)
    ruleset = call(_CREATE, ctypes.byref(attributes), ctypes.c_size_t(8), ctypes.c_uint32(0))
    if ruleset < 0:
        return False
    try:
        for path, rights in ((folder, handled), ("/dev", handled), ("/proc", handled & _FILE_RIGHTS)):
            _allow(call, ruleset, path, rights)
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0):
            return False
        return not call(_RESTRICT, ruleset, ctypes.c_uint32(0))
    finally:
        os.close(ruleset)


class _Beneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("rights", ctypes.c_uint64), ("folder", ctypes.c_int32)]


def _allow(call: Any, ruleset: int, path: str, rights: int) -> None:
    try:
        descriptor = os.open(path, getattr(os, "O_PATH", 0) | os.O_CLOEXEC)
    except internal_error(OSError):
        return
    try:
        rule = _Beneath(rights, descriptor)
        call(_ADD, ruleset, ctypes.c_int(1), ctypes.byref(rule), ctypes.c_uint32(0))
    finally:
        os.close(descriptor)
