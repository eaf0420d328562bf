"""Writes files anew so that nothing is lost: whole or not at all, with a backup beside each, and only what may be written to."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path

from gradguard.core.callsite import USER_FILES
from gradguard.fixes.patched_files import hash_of


class RewriteError(Exception):
    """A file that was not written; the message says which and why. No file is left changed."""


def readable(path: str, sha256: str, project: str) -> bytes:
    """The contents of a file that may be rewritten: the user's own, inside the project, and as it was when its patch was made.

    Raises:
        RewriteError: it may not.
    """
    if not os.path.isabs(path) or os.path.normpath(path) != path:
        raise RewriteError(f"{path}: not a plain absolute path")
    if not path.endswith(".py") or not USER_FILES[path]:
        raise RewriteError(f"{path}: not a Python file of your own")
    if os.path.islink(path):
        raise RewriteError(f"{path}: a symbolic link; patch the file that it leads to")
    inside = os.path.join(os.path.realpath(project), "")
    if not os.path.realpath(path).startswith(inside):
        raise RewriteError(f"{path}: outside of {project}; run this in the project's own folder")
    try:
        status = os.lstat(path)
        if not stat.S_ISREG(status.st_mode):
            raise RewriteError(f"{path}: not a regular file")
        if not status.st_mode & 0o222 or not os.access(path, os.W_OK):
            raise RewriteError(f"{path}: read-only")
        content = Path(path).read_bytes()
    except OSError as error:
        raise RewriteError(f"{path}: {error.strerror or error}") from None
    if hash_of(content) != sha256:
        raise RewriteError(f"{path}: changed since the run; run the program again for a patch that fits")
    return content


def rewrite(contents: Mapping[str, tuple[bytes, bytes]]) -> list[str]:
    """Puts new contents in the place of old ones, in all files or in none; gives the backups' paths.

    Each file is written beside the old one, brought to the disk and then renamed over it, so that a process killed in between leaves
    either the old file or the new one, and the backup.

    Args:
        contents: old and new, by path.

    Raises:
        RewriteError: a file could not be written, or is not as the old contents have it.
    """
    made: list[str] = []  # to be removed where the work is not done
    fresh: dict[str, str] = {}
    backups: dict[str, str] = {}
    replaced: list[str] = []
    done = False
    current = ""
    try:
        for path, (old, new) in contents.items():
            current = path
            mode = stat.S_IMODE(os.stat(path).st_mode)
            backups[path] = _written(path + ".bak", old, mode, made)
            fresh[path] = _written(path + ".new", new, mode, made)
        for path, (old, _) in contents.items():
            current = path
            if os.path.islink(path) or Path(path).read_bytes() != old:
                raise RewriteError(f"{path}: changed just now")
            os.replace(fresh[path], path)
            replaced.append(path)
            made.remove(fresh[path])
        done = True
    except OSError as error:
        raise RewriteError(f"{current}: {error.strerror or error}; nothing was changed") from None
    finally:
        if not done:
            for path in replaced:
                os.replace(backups[path], path)
                made.remove(backups[path])
            for path in made:
                Path(path).unlink(missing_ok=True)
    return list(backups.values())


def _written(path: str, content: bytes, mode: int, made: list[str]) -> str:
    """Writes a file that is not there yet, whole and on the disk; of names that are taken, the next."""
    number = 0
    while True:
        name = path if not number else f"{path}{number}"
        try:
            descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o600)
        except FileExistsError:
            number += 1
            continue
        break
    made.append(name)
    try:
        rest = memoryview(content)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    os.chmod(name, mode)
    return name
