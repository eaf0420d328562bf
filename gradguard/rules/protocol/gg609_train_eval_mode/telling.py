"""What the causes of GG609 say in the same words."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from gradguard.analysis.incident import Incident
from gradguard.core.diagnosis import Fix, SourceSpan
from gradguard.core.safe_read import modules_in
from gradguard.monitors.train_modes import ACTING
from gradguard.rules import wording
from gradguard.rules.spans import not_called


def acting(*roots: nn.Module) -> str:
    """What in the modules depends on the mode."""
    parts = [m for root in roots for m in modules_in(root) if isinstance(m, ACTING)]
    return " and ".join(sorted({"batch normalisation" if isinstance(m, _BatchNorm) else "dropout" for m in parts}))


def act(what: str) -> str:
    """The verb to what depends on the mode."""
    return "act" if " and " in what else "acts"


def uncalled(
    incident: Incident, name: str, method: str, culprit: SourceSpan | None, fix: Fix
) -> tuple[SourceSpan | None, Fix, SourceSpan | None]:
    """The statement that only names the method that would switch the mode, as the culprit; what was one comes along."""
    bare = not_called(incident.sources, method, name)
    if bare is None:
        return culprit, fix, None
    written = Fix(title=f"Write the parentheses: `{wording.short(bare[0].text, 40)}()`", safety="unsafe", patch=bare[1])
    return bare[0], written, None if culprit is None else culprit.model_copy(update={"role": "context"})
