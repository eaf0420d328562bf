"""Call sites: where in the user's code something happened.

Captured as (code object, instruction offset), which costs well under a microsecond; turned into file, line, columns and
expression only when a diagnosis needs it (`gradguard.evidence.source`).

"The user's code" is every file that is not PyTorch's, gradguard's, the standard library's or an installed package's. In a
stack with no such file (a training script that is itself an installed package) no call site is known.
"""

from __future__ import annotations

import os
import sysconfig
from types import CodeType, FrameType
from typing import NamedTuple

import torch

_GRADGUARD_DIR = os.path.dirname(os.path.abspath(__file__)) + os.sep
_INTEGRATIONS_DIR = os.path.join(os.path.dirname(_GRADGUARD_DIR.rstrip(os.sep)), "integrations") + os.sep
_TORCH_DIR = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_PATHS = sysconfig.get_paths()
_LIBRARY_DIRS = tuple({os.path.abspath(_PATHS[key]) + os.sep for key in ("stdlib", "platstdlib", "purelib", "platlib", "scripts")})


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
    if path.startswith((_GRADGUARD_DIR, _INTEGRATIONS_DIR, _TORCH_DIR)):
        return False
    if "site-packages" in path or "dist-packages" in path:
        return False
    return not path.startswith(_LIBRARY_DIRS)


USER_FILES = _UserFiles()


def is_torch_or_own(filename: str) -> bool:
    """Whether the file belongs to PyTorch or to gradguard, which are never shown to a user."""
    path = os.path.abspath(filename)
    return path.startswith((_GRADGUARD_DIR, _INTEGRATIONS_DIR, _TORCH_DIR))


def user_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame of the user's, from `frame` outwards; None when there is none."""
    files = USER_FILES
    while frame is not None and not files[frame.f_code.co_filename]:
        frame = frame.f_back
    return frame


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
