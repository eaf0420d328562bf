"""What several tests of this folder need."""

from __future__ import annotations

from gradguard.core.diagnosis import Diagnosis, Severity, SourceSpan


def diagnosis(
    code: str = "GG601", name: str = "stale-gradients", severity: Severity = "error", file: str = "train.py", line: int = 1
) -> Diagnosis:
    """A diagnosis whose culprit is one line of a file."""
    span = SourceSpan(file=file, line=line, end_line=line, role="culprit")
    return Diagnosis(code=code, name=name, severity=severity, headline="Gradients of the last step are still there.", culprit=span)
