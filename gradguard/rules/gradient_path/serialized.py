"""GG302, the other way round: a tensor with a graph is sent to another process."""

from __future__ import annotations

from gradguard.diagnosis import Diagnosis
from gradguard.rules.incident import Incident

MESSAGES = ("cowardly refusing to serialize non-leaf tensor",)


def recognise(incident: Incident) -> Diagnosis | None:
    """The tensor that cannot travel, and where it was put into the message."""
    return None
