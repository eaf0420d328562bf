"""gradguard: training-loop guard middleware for PyTorch.

    from gradguard import gradguard

    with gradguard():
        loss = model(batch).mean()
        loss.backward()

When forward, `backward()` or the optimizer fails, the error names the line that is the bug. See README.md.
"""

from __future__ import annotations

from gradguard.diagnosis import Diagnosis
from gradguard.errors import ConfigError, GradGuardError, GradGuardWarning
from gradguard.guard import Guard, gradguard
from gradguard.settings import Settings
from gradguard.suppress import ignore

__all__ = ["ConfigError", "Diagnosis", "GradGuardError", "GradGuardWarning", "Guard", "Settings", "gradguard", "ignore"]
__version__ = "0.1.0"
