"""Calls that come from within torch.distributions: drawing a sample, rating one."""

from __future__ import annotations

import os
from types import FrameType
from typing import Any

from gradguard.core.callsite import PACKAGE_DIR
from gradguard.core.safe_read import variables_of

_DISTRIBUTIONS = os.sep + os.path.join("torch", "distributions") + os.sep


def sampled_distribution(frame: FrameType | None) -> Any:
    """The torch distribution whose `sample()` the call comes from, if it does."""
    frame = _out_of_here(frame)
    for _ in range(4):
        if frame is None or _DISTRIBUTIONS not in frame.f_code.co_filename:
            return None
        if frame.f_code.co_name == "sample":
            return variables_of(frame).get("self")
        frame = frame.f_back
    return None


def _out_of_here(frame: FrameType | None) -> FrameType | None:
    """The frame that made the torch call: below it stand gradguard's own."""
    while frame is not None and frame.f_code.co_filename.startswith(PACKAGE_DIR):
        frame = frame.f_back
    return frame


def is_scoring(frame: FrameType | None) -> bool:
    """Whether the call comes from a distribution's `log_prob`, or the like."""
    frame = _out_of_here(frame)
    for _ in range(6):
        if frame is None or _DISTRIBUTIONS not in frame.f_code.co_filename:
            return False
        if frame.f_code.co_name in ("log_prob", "cdf", "icdf"):
            return True
        frame = frame.f_back
    return False
