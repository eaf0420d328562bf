"""The closing summary of a run: `guard.summary()`, `gradguard run --summary`."""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field

if TYPE_CHECKING:
    from gradguard.monitors.gradient_ledger import Ledger
    from gradguard.monitors.summary_records import OptimizerRecord

_LISTED = 8


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid")


class LayerNorms(_Model):
    """Gradient norms of one layer over the recorded steps."""

    layer: str
    first: float
    median: float
    last: float


class OptimizerSummary(_Model):
    """What one optimizer did."""

    type_name: str
    steps: int
    parameters: int = Field(description="how many it has")
    never_moved: list[str] = Field(default_factory=list, description="parameters that no step changed")
    without_gradient: list[str] = Field(default_factory=list, description="parameters that had no gradient at any recorded step")
    norms: list[LayerNorms] = Field(default_factory=list, description="gradient norms by layer, at one step in sixteen")
    nonfinite_steps: int = Field(0, description="recorded steps with a gradient that was not finite")


class RunSummary(_Model):
    """A whole run."""

    steps: int = Field(description="optimizer steps")
    backwards: int = Field(description="backward calls")
    skipped: int = Field(0, description="optimizer steps that were left out because of a non-finite gradient (GG502, skip_step)")
    optimizers: list[OptimizerSummary] = Field(default_factory=list)
    found: dict[str, int] = Field(default_factory=dict, description="how often each cause was met, by code, name and place")
    ignored: dict[str, int] = Field(default_factory=dict, description="ignore comments and how often each silenced something")

    def text(self) -> str:
        """The summary for people."""
        lines = [f"gradguard: {self.steps} optimizer steps, {self.backwards} backward calls"]
        if self.skipped:
            lines.append(f"  {self.skipped} of them left out: their gradients were not finite")
        for each in self.optimizers:
            lines.append(f"  {each.type_name}: {each.steps} steps, {each.parameters} parameters")
            lines += _listed("never changed", each.never_moved) + _listed("never had a gradient", each.without_gradient)
            if each.nonfinite_steps:
                lines.append(f"    {each.nonfinite_steps} recorded steps had a gradient that is not finite")
            if each.norms:
                lines.append("    gradient norm by layer    first      median     last")
                lines += [f"      {norm.layer:<22} {norm.first:<10.3g} {norm.median:<10.3g} {norm.last:<10.3g}" for norm in each.norms[:40]]
        lines += [f"  found: {what}, {count} time{'s' if count > 1 else ''}" for what, count in self.found.items()]
        lines += [f"  ignored: {what}, {count} time{'s' if count > 1 else ''}" for what, count in self.ignored.items()]
        return "\n".join(lines)


def summary_of(ledger: Ledger, skipped: int, found: dict[str, int], ignored: dict[str, int]) -> RunSummary:
    """The summary of a run so far.

    Args:
        skipped: steps that were left out.
        found: how often each diagnosis was made.
        ignored: how often each `gradguard: ignore` comment has silenced one.
    """
    records = [] if ledger.recorder is None else list(ledger.recorder.records.values())
    return RunSummary(
        steps=ledger.steps,
        backwards=ledger.backwards,
        skipped=skipped,
        optimizers=[_optimizer(record) for record in records],
        found=found,
        ignored=ignored,
    )


def _optimizer(record: OptimizerRecord) -> OptimizerSummary:
    norms = [
        LayerNorms(layer=layer, first=recorded[0][1], median=_median([norm for _, norm in recorded]), last=recorded[-1][1])
        for layer, recorded in record.norms.items()
        if recorded
    ]
    return OptimizerSummary(
        type_name=record.type_name,
        steps=record.steps,
        parameters=len(record.names),
        never_moved=[name for name, moved in zip(record.names, record.moved, strict=True) if not moved],
        without_gradient=[name for name, got in zip(record.names, record.got_gradient, strict=True) if not got],
        norms=norms,
        nonfinite_steps=record.nonfinite,
    )


def _median(values: list[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return statistics.median(finite) if finite else math.nan


def _listed(what: str, names: list[str]) -> list[str]:
    if not names:
        return []
    rest = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return [f"    {what}: {', '.join(names[:_LISTED])}{rest}"]
