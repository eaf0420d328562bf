"""Layers behind a dead activation whose weights are all exactly zero: initialised so, and without a gradient for ever."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import torch

from gradguard.analysis.incident import Incident
from gradguard.analysis.places.source import ResolvedSite
from gradguard.analysis.program.bindings import dotted
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
    for source in sources:
        for node in ast.walk(source.tree) if source.tree is not None else ():
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            method = node.func.attr
            target = node.func.value if method in ("zero_", "fill_") else node.args[0] if node.args else None
            value = node.args[-1] if method == "fill_" and node.args else node.args[1] if len(node.args) > 1 else None
            if method not in ("zeros_", "zero_") and not (method in ("constant_", "fill_") and _is_zero(value)):
                continue
            statement = source.statement(node)
            if target is not None and "weight" in (dotted(target) or "").split(".") and statement is not None:
                yield source, statement


def _is_zero(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) in (int, float) and node.value == 0
