"""Which files a diagnosis's patches are for, and why each fix is safe or not: what every rule's fixes are completed with."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

from gradguard.core.callsite import USER_FILES
from gradguard.core.diagnosis import Fix, PatchedFile, Safety
from gradguard.core.foreign_exceptions import internal_error
from gradguard.fixes.application import PatchError, Text, changes_of

REASONS: dict[Safety, str] = {
    "safe": "a correct program computes the same with it",
    "unsafe": "it changes what is computed, or how much memory that takes",
    "manual": "what is right here depends on what is meant",
}
_SECTION = re.compile(r"^## Fix safety\n(.+?)(?=\n\n|\n##|\Z)", re.DOTALL | re.MULTILINE)


def completed(fixes: list[Fix], docs: str) -> list[Fix]:
    """The fixes with the files of their patches, and with the reason that the rule's page has for their safety.

    A patch that a tool could not apply (a cell of a notebook, a library's file, a text that is not the file's) is left out.
    """
    return [_completed(fix, docs) for fix in fixes]


def _completed(fix: Fix, docs: str) -> Fix:
    updates: dict[str, object] = {}
    if fix.reason is None:
        updates["reason"] = _reason(fix.safety, docs)
    if fix.patch is not None and not fix.files:
        files = _files(fix.patch)
        updates |= {"files": files} if files else {"patch": None}
    return fix.model_copy(update=updates) if updates else fix


def _files(patch: str) -> list[PatchedFile]:
    try:
        changes = changes_of(patch)
        found = [file_of(os.path.abspath(name), name) for name in changes]
        for file, of_file in zip(found, changes.values(), strict=True):
            Text.read(Path(file.path).read_bytes()).changed(of_file)
    except internal_error(PatchError, OSError):
        return []
    return found if all(USER_FILES[file.path] for file in found) else []


def file_of(path: str, name: str) -> PatchedFile:
    """The record of a file as it is now.

    Raises:
        OSError: it cannot be read.
    """
    return PatchedFile(name=name, path=path, sha256=hash_of(Path(path).read_bytes()))


def hash_of(content: bytes) -> str:
    """What tells a changed file."""
    return hashlib.sha256(content).hexdigest()


def _reason(safety: Safety, docs: str) -> str:
    """What the page says of this safety, if it begins with that; else what the word means."""
    section = _SECTION.search(docs)
    text = " ".join(section[1].split()) if section else ""
    head, colon, rest = text.partition(": ")
    return rest.rstrip(".") if colon and head.lower() == safety else REASONS[safety]
