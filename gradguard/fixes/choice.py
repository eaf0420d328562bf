"""Which fixes of a report are to be made, and the texts with all of them in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gradguard.core.diagnosis import Diagnosis, Fix, PatchedFile, Safety
from gradguard.fixes.application import Change, PatchError, Text, changes_of


@dataclass
class Choice:
    """What is to be done about the diagnoses of a report.

    Attributes:
        chosen: each with the fix to make.
        left: each with the reason why there is none.
        changes: by path.
        files: by path, as the report has them.
        withheld: whether a fix was left because it is not safe.
    """

    chosen: list[tuple[Diagnosis, Fix]] = field(default_factory=list)
    left: list[tuple[Diagnosis, str]] = field(default_factory=list)
    changes: dict[str, list[Change]] = field(default_factory=dict)
    files: dict[str, PatchedFile] = field(default_factory=dict)
    withheld: bool = False


def choose(diagnoses: Sequence[Diagnosis], unsafe: bool) -> Choice:
    """The fix of each diagnosis that comes first among those that may be made; of fixes that touch the same lines, one is made.

    Args:
        unsafe: whether fixes may be made that change what is computed.
    """
    choice = Choice()
    seen: set[tuple[str, str, int]] = set()
    for diagnosis in diagnoses:
        if diagnosis.key in seen:
            continue
        seen.add(diagnosis.key)
        fix, reason = _best(diagnosis)
        if fix is None:
            choice.left.append((diagnosis, reason))
            continue
        if not unsafe and _safety(fix) != "safe":
            safe = next((each for each in _made(diagnosis) if _safety(each) == "safe"), None)
            if safe is None:
                choice.left.append((diagnosis, _withheld(fix)))
                choice.withheld = True
                continue
            fix = safe
        try:
            _add(choice, fix)
        except PatchError as error:
            choice.left.append((diagnosis, str(error)))
        else:
            choice.chosen.append((diagnosis, fix))
    return choice


def _made(diagnosis: Diagnosis) -> list[Fix]:
    """The fixes that can be made, and have not failed."""
    return [fix for fix in diagnosis.fixes if fix.patch is not None and fix.files and fix.verified.verdict != "failed"]


def _best(diagnosis: Diagnosis) -> tuple[Fix | None, str]:
    if made := _made(diagnosis):
        return made[0], ""
    failed = next((fix for fix in diagnosis.fixes if fix.verified.verdict == "failed"), None)
    if failed is not None:
        return None, f"its fix was tried, and failed: {failed.verified.why}"
    return None, "its fix cannot be written as a patch" if diagnosis.fixes else "it has no fix"


def _safety(fix: Fix) -> Safety:
    return fix.verified.safety or fix.safety


def _withheld(fix: Fix) -> str:
    if fix.safety == "safe":
        return "its fix changes results where it repairs what is behind"
    return f"its fix {'changes results' if fix.safety == 'unsafe' else 'depends on what you mean'} ({fix.reason})"


def _add(choice: Choice, fix: Fix) -> None:
    """Adds a fix's changes.

    Raises:
        PatchError: they cannot be read, or touch lines that another fix changes.
    """
    patch, files = (fix.verified.patch, fix.verified.files) if fix.verified.patch is not None else (fix.patch, fix.files)
    named = {file.name: file for file in files}
    new: dict[str, list[Change]] = {}
    for name, changes in changes_of(patch or "").items():
        file = named.get(name)
        if file is None:
            raise PatchError(f"the patch is for {name}, which the report does not know")
        if choice.files.get(file.path, file).sha256 != file.sha256:
            raise PatchError(f"{name} changed between two diagnoses")
        known = choice.changes.get(file.path, [])
        if any(change.overlaps(other) for change in changes for other in known):
            raise PatchError("it touches lines that another fix changes; run the program again after that one")
        new[file.path] = [change for change in changes if change not in known]
    for file in files:
        choice.files[file.path] = file
    for path, changes in new.items():
        choice.changes.setdefault(path, []).extend(changes)


def texts_with(choice: Choice, texts: Mapping[str, Text]) -> dict[str, Text]:
    """The texts with all chosen changes made.

    Raises:
        PatchError: one does not fit, or what comes out is not Python.
    """
    result = {}
    for path, changes in choice.changes.items():
        text = texts[path].changed(changes)
        if not text.is_python():
            raise PatchError(f"{path} would not be Python any more")
        result[path] = text
    return result
