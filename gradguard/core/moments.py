"""The moments of a step at which rules are asked."""

from __future__ import annotations

from typing import Literal

# "error": PyTorch (or Python) raised. The others are moments of a step at which silent bugs are looked for.
# "finding": a monitor found something for one rule to judge.
Moment = Literal["error", "before_backward", "after_backward", "before_step", "finding"]
