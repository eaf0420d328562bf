"""What a trial's process is told by the one that starts it."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

VARIABLE = "GRADGUARD_TRIAL"  # set in a trial's process: nothing is verified there


class Order(BaseModel):
    """What a trial is to do.

    Attributes:
        settings: of the guard.
        folder: all that may be written to.
        events: the file for what is seen, inside it.
        roots: original folders and where they are now.
        steps: enough, where they have taken as long as `patience`.
        patience: seconds from the first step within which a program that would end by itself is let run to its end.
        seconds: the time limit.
    """

    model_config = ConfigDict(extra="forbid")

    settings: dict[str, Any]
    folder: str
    events: str
    roots: dict[str, str]
    steps: int
    patience: float
    seconds: float
