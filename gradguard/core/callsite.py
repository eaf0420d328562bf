"""Call sites: where in the user's code something happened.

Captured as (code object, instruction offset), which costs well under a microsecond; turned into file, line, columns and
expression only when a diagnosis needs it (`gradguard.analysis.places.source`).

"The user's code" is every file that is not PyTorch's, gradguard's, the standard library's or an installed package's. In a
stack with no such file (a training script that is itself an installed package) no call site is known.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from types import CodeType, FrameType
from typing import NamedTuple

import torch

PACKAGE_DIR = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_INTEGRATIONS_DIR = os.path.join(os.path.dirname(PACKAGE_DIR.rstrip(os.sep)), "integrations") + os.sep
_TORCH_DIR = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_PATHS = sysconfig.get_paths()
_LIBRARY_DIRS = tuple({os.path.abspath(_PATHS[key]) + os.sep for key in ("stdlib", "platstdlib", "purelib", "platlib", "scripts")})

_MOST_STACKS = 256  # places of backward calls and steps


class CallSite(NamedTuple):
    """A place in running code: `lasti` is the byte offset of the instruction that was executing in `code`."""

    code: CodeType
    lasti: int

    def __hash__(self) -> int:
        # a code object's own hash goes through all its constants and names, some microseconds for a long function
        return hash((id(self.code), self.lasti))

    @property
    def line(self) -> int:
        """The 1-based line of the instruction (the first line of its expression)."""
        for start, end, line in self.code.co_lines():
            if start <= self.lasti < end and line is not None:
                return line
        return self.code.co_firstlineno


class _UserFiles(dict[str, bool]):
    """File name -> "is this the user's?", decided once a file."""

    def __missing__(self, filename: str) -> bool:
        if len(self) > 50_000:  # generated code in endless new "files" must not grow the cache
            self.clear()
        verdict = self[filename] = _is_user_file(filename)
        return verdict


def _is_user_file(filename: str) -> bool:
    if filename.startswith(("<frozen ", "<__array_function__")):
        return False
    if filename.startswith("<"):
        # "<stdin>", "<string>", "<ipython-input-...>" are typed by people; torch.fx and dataclasses name theirs so as well
        return not filename.startswith(("<eval_with_key>", "<attrs generated", "<string_dataclass"))
    path = os.path.abspath(filename)
    if path.startswith((PACKAGE_DIR, _INTEGRATIONS_DIR, _TORCH_DIR)):
        return False
    if "site-packages" in path or "dist-packages" in path:
        return False
    return not path.startswith(_LIBRARY_DIRS)


USER_FILES = _UserFiles()


def is_torch_or_own(filename: str) -> bool:
    """Whether the file belongs to PyTorch or to gradguard, which are never shown to a user."""
    path = os.path.abspath(filename)
    return path.startswith((PACKAGE_DIR, _INTEGRATIONS_DIR, _TORCH_DIR))


def user_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame of the user's, from `frame` outwards; None when there is none."""
    files = USER_FILES
    while frame is not None and not files[frame.f_code.co_filename]:
        frame = frame.f_back
    return frame


def site_of(frame: FrameType | None) -> CallSite | None:
    """The user's innermost call, from `frame` outwards; None when there is none."""
    caller = user_frame(frame)
    return None if caller is None else CallSite(caller.f_code, caller.f_lasti)


def user_stack(frame: FrameType | None, limit: int = 12) -> tuple[CallSite, ...]:
    """The user's frames from `frame` outwards, innermost first, at most `limit` of them."""
    files = USER_FILES
    found: list[CallSite] = []
    while frame is not None and len(found) < limit:
        code = frame.f_code
        if files[code.co_filename]:
            found.append(CallSite(code, frame.f_lasti))
        frame = frame.f_back
    return tuple(found)


class KnownStacks:
    """The user's frames around a call, looked for first at the depths where they were the last time.

    Every `f_back` makes an object of a frame that had none yet, and there are some 45 between the backward call of a trainer and
    the script that started it. Who calls from the same instruction, with the same frames of the user's as deep, came the same way.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], tuple[CodeType, tuple[tuple[int, CodeType, int], ...], list[tuple[CodeType, int]]]] = {}

    def around(self, frame: FrameType, depth: int) -> list[tuple[CodeType, int]]:
        """The user's frames from `frame` outwards, innermost first: their code and the instruction in it. Not to be changed.

        Args:
            depth: how many frames `frame` is away from the function that calls this one.
        """
        code, lasti = frame.f_code, frame.f_lasti
        key = (id(code), lasti)
        known = self._known.get(key)
        if known is not None and known[0] is code:
            try:
                for away, its_code, its_lasti in known[1]:
                    at = sys._getframe(depth + away)
                    if at.f_code is not its_code or at.f_lasti != its_lasti:
                        break
                else:
                    return known[2]
            except ValueError:  # no stack is as deep
                pass
        found: list[tuple[int, CodeType, int]] = []
        files = USER_FILES
        walk: FrameType | None = frame
        away = 1
        while walk is not None:
            its_code = walk.f_code
            if files[its_code.co_filename]:
                found.append((away, its_code, walk.f_lasti))
            walk = walk.f_back
            away += 1
        frames = [(its_code, its_lasti) for _, its_code, its_lasti in found]
        if found and sys._getframe(depth + 1) is frame:
            if len(self._known) >= _MOST_STACKS:
                self._known.clear()
            self._known[key] = (code, tuple(found), frames)
        return frames
