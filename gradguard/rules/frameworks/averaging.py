"""Programs that bring the ranks together themselves, now and then: local SGD, a loop of `all_reduce` over gradients."""

from __future__ import annotations

import ast

from gradguard.analysis.incident import Incident
from gradguard.analysis.places.source import module_ast
from gradguard.analysis.program.expressions import inside, last_part
from gradguard.analysis.program.user_calls import user_files

_COLLECTIVES = ("all_reduce", "all_reduce_coalesced", "reduce", "reduce_scatter", "broadcast")  # those that write what they are given


_AVERAGERS = ("LocalSGD", "PeriodicModelAverager", "HierarchicalModelAverager")


def averaged_by_hand(incident: Incident) -> bool:
    """Whether the program brings the ranks together itself, now and then: local SGD, a loop of `all_reduce` over gradients."""
    if any(type(value).__name__ in _AVERAGERS for _, value in incident.names.bindings):
        return True
    for file in user_files(incident):
        tree = module_ast(file)
        for node in inside(tree, ast.Call):
            if last_part(node.func) in _AVERAGERS or last_part(node.func) == "average_parameters":
                return True
            if last_part(node.func) in _COLLECTIVES and any(_of_parameters(argument) for argument in node.args):
                return True
    return False


def _of_parameters(argument: ast.expr) -> bool:
    read = {item.attr for item in inside(argument, ast.Attribute)}
    read |= {item.id for item in inside(argument, ast.Name)}
    return any(name in ("grad", "data", "p", "w") or "param" in name or "grad" in name or "weight" in name for name in read)
