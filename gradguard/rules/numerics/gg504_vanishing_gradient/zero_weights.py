"""Layers behind a dead activation whose weights are all exactly zero: initialised so, and without a gradient for ever."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import torch

from gradguard.analysis.incident import Incident
from gradguard.analysis.places.source import ResolvedSite
from gradguard.analysis.program.bindings import dotted
from gradguard.analysis.program.expressions import argument, is_constant, last_part
from gradguard.analysis.program.index import calls_in
from gradguard.analysis.program.syntax import Source
from gradguard.core.diagnosis import Fix
from gradguard.rules.spans import the_one

REPAIR = Fix(title="initialise the weights at random (`nn.init.xavier_uniform_`, `nn.init.kaiming_uniform_`); zeros are for biases only")


def all_zero(leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    """The weight matrices among them that are zero throughout, where there is no other."""
    weights = [leaf for leaf in leaves if leaf.dim() > 1 and leaf.layout == torch.strided]
    zero = [weight for weight in weights if not bool(weight.detach().any())]
    return zero if len(zero) > 1 else []


def set_to_zero(incident: Incident) -> ResolvedSite | None:
    """The one statement that fills weights with zeros."""
    return the_one(incident, _fillings)


def _fillings(sources: list[Source]) -> Iterator[tuple[Source, ast.stmt]]:
    """`nn.init.zeros_(layer.weight)`, `nn.init.constant_(layer.weight, 0)`, `layer.weight.data.zero_()`, `.fill_(0)`."""
    for source, call in calls_in(sources, "zeros_", "zero_", "constant_", "fill_"):
        method = last_part(call)
        value = argument(call, "value", 0) if method == "fill_" else argument(call, "val", 1) if method == "constant_" else ast.Constant(0)
        filled = is_constant(value, 0, 0.0)
        target = call.args[0] if method in ("zeros_", "constant_") and call.args else getattr(call.func, "value", None)
        statement = source.statement(call)
        if filled and target is not None and "weight" in (dotted(target) or "").split(".") and statement is not None:
            yield source, statement
