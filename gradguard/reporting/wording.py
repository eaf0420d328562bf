"""The words of a report: what severities, safeties, confidences and tensors are called, the same in every format."""

from __future__ import annotations

import re

from gradguard.core.diagnosis import Confidence, Diagnosis, Fix, Safety, TensorFacts
from gradguard.reporting.source_blocks import shown_path
from gradguard.reporting.terminal.layout import one_line

SAFETY: dict[Safety, str] = {
    "safe": "safe",
    "unsafe": "review first: it changes results",
    "manual": "decide yourself: it depends on what you mean",
}

CULPRIT: dict[Confidence, str] = {"certain": "culprit", "likely": "likely culprit", "possible": "possible culprit"}
CONFIDENCE: dict[Confidence, str] = {
    "certain": "",
    "likely": "likely, not certain",
    "possible": "possible, not certain: check it before you change the code",
}
NO_CULPRIT = "could not determine the exact line"
_PLAIN_WORD = re.compile(r"[a-z]+[ ,:]")  # code stands as it is written


def fix_title(fix: Fix) -> str:
    """The change in one line, with a capital and without a full stop, however the rule writes it."""
    text = one_line(fix.title).rstrip()
    if text.endswith(".") and not text.endswith(".."):
        text = text[:-1]
    return text[:1].upper() + text[1:] if _PLAIN_WORD.match(text) else text


def standing(fix: Fix) -> str:
    """What a change may do, and what came of trying it."""
    verified = fix.verified
    words = SAFETY[verified.safety or fix.safety]
    if verified.verdict == "verified":
        return f"{words}; verified over {_count(verified.steps, 'step')}" if verified.steps else f"{words}; verified: {verified.why}"
    if verified.why is None:
        return words
    return f"{words}; {'tried, and failed' if verified.verdict == 'failed' else 'not verified'}: {verified.why}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def title(diagnosis: Diagnosis) -> str:
    """The first line: severity, code and headline, never broken, because logs and test summaries show just this line."""
    return f"{diagnosis.severity}[{diagnosis.code}]: {one_line(diagnosis.headline)}"


def headline(diagnosis: Diagnosis) -> str:
    """The diagnosis in one line, with the place."""
    place = diagnosis.place
    return title(diagnosis) + (f" ({shown_path(place.file)}:{place.line})" if place else "")


def title_at(diagnosis: Diagnosis) -> str:
    """Code, name and place, for one line of a command's output."""
    place = diagnosis.place
    return diagnosis.title() if place is None else diagnosis.title(shown_path(place.file), place.line)


def when(diagnosis: Diagnosis) -> str:
    """Step, rank and thread, as far as known and worth saying."""
    parts = []
    if diagnosis.step is not None:
        parts.append(f"step {diagnosis.step}")
    if diagnosis.rank is not None:
        parts.append(f"rank {diagnosis.rank}")
    if diagnosis.thread and diagnosis.thread != "MainThread":
        parts.append(f"thread {one_line(diagnosis.thread)}")
    return ", ".join(parts)


def tensor_rows(tensors: list[TensorFacts], arrow: str = "->") -> list[tuple[str, str]]:
    """(name, facts) of each tensor. The device is said only where it is not the CPU for all of them."""
    devices = {tensor.device for tensor in tensors if tensor.device}
    return [(_tensor_name(tensor), _tensor_facts(tensor, arrow, devices != {"cpu"})) for tensor in tensors]


def tensor_table(tensors: list[TensorFacts], arrow: str = "->") -> list[list[str]]:
    """All that is known of each tensor, as a table with a head; columns in which nothing is known are left out."""
    head = ["name", "kind", "dtype", "shape", "device", "module", "version", "grad"]
    grad = {None: "", True: "yes", False: "no"}
    rows = [
        [
            _tensor_name(tensor),
            tensor.kind,
            (tensor.dtype or "").removeprefix("torch."),
            "" if tensor.shape is None else str(tensor.shape),
            tensor.device or "",
            one_line(tensor.module or ""),
            _versions(tensor, arrow),
            grad[tensor.requires_grad],
        ]
        for tensor in tensors
    ]
    known = [i for i in range(len(head)) if any(row[i] for row in rows)]
    return [[row[i] for i in known] for row in [head, *rows]]


def _versions(tensor: TensorFacts, arrow: str) -> str:
    saved, found = tensor.version_saved, tensor.version_found
    if saved is not None and found is not None:
        return str(saved) if saved == found else f"{saved} {arrow} {found}"
    return "" if saved is None and found is None else str(found if saved is None else saved)


def _tensor_name(tensor: TensorFacts) -> str:
    return one_line(tensor.name) if tensor.name else f"(unnamed {tensor.kind})"


def _tensor_facts(tensor: TensorFacts, arrow: str, with_device: bool) -> str:
    facts: list[str] = []
    if tensor.kind != "tensor" and tensor.name:
        facts.append(tensor.kind)
    dtype = (tensor.dtype or "").removeprefix("torch.")
    shape = "" if tensor.shape is None else str(tensor.shape)
    if dtype or shape:
        facts.append(f"{dtype} {shape}".strip())
    if tensor.device and with_device:
        facts.append(f"on {tensor.device}")
    if tensor.module:
        facts.append(f"of {one_line(tensor.module)}")
    if tensor.version_saved is not None and tensor.version_found is not None:
        same = tensor.version_saved == tensor.version_found
        facts.append(f"version {tensor.version_saved}" if same else f"version {tensor.version_saved} {arrow} {tensor.version_found}")
    elif tensor.version_saved is not None:
        facts.append(f"saved at version {tensor.version_saved}")
    elif tensor.version_found is not None:
        facts.append(f"version {tensor.version_found}")
    if tensor.requires_grad is False:
        facts.append("requires_grad=False")
    return ", ".join(facts)


def repeats(diagnosis: Diagnosis) -> str:
    """How often the same cause was met again."""
    if diagnosis.repeats <= 0:
        return ""
    return f"{diagnosis.repeats} more {'time' if diagnosis.repeats == 1 else 'times'} after it was first said"


def more(diagnosis: Diagnosis) -> str:
    """Where to read on: the rule's page, with the name that configs and suppressions use."""
    return f"gradguard explain {diagnosis.code} ({diagnosis.name})"
