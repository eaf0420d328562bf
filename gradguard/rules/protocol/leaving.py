"""Where parameters that never get a gradient were last seen with a path: as a number, or written in without grad. Part of GG605.

A number carries no memory, so it is not known that the loss was computed from it; but where this is all that happened to a
value in the steps looked at, it is where to look.
"""

from __future__ import annotations

import ast

import torch

from gradguard.analysis.history import cut_origins
from gradguard.analysis.history.cut_origins import Origin
from gradguard.analysis.incident import Incident
from gradguard.analysis.places.source import ResolvedSite, dotted
from gradguard.monitors.gradient_ledger import Ledger

_REPORTS = (
    "print",
    "log",
    "info",
    "debug",
    "warning",
    "write",
    "append",
    "update",
    "log_dict",
    "add_scalar",
    "set_postfix",
    "set_description",
)


def left(incident: Incident, parameters: list[torch.Tensor]) -> list[Origin]:
    """The one statement where what all of them stand behind left autograd and was used on; of several none is known to be it."""
    met = incident.notes[Ledger].severed.met(parameters)
    found = cut_origins.merged(cut_origins.of_cut(incident, cut) for cut in met if cut.kind == "escape" or cut.into_graph)
    used = [origin for origin in found if origin.place is not None and not _reported(origin.place)]
    statements = {(origin.place.file, getattr(origin.place.statement, "lineno", 0)) for origin in used if origin.place is not None}
    return used[:1] if len(statements) == 1 else []


def _reported(place: ResolvedSite) -> bool:
    """Whether the number is only shown, kept or counted: in an f-string or a record, given to a logger, added to a running total."""
    if place.source is None or place.node is None or isinstance(place.statement, ast.AugAssign):
        return True
    for above in place.source.ancestors(place.node):
        if isinstance(above, (ast.JoinedStr, ast.Dict)) or (isinstance(above, ast.Tuple) and isinstance(place.statement, ast.Return)):
            return True
        if isinstance(above, ast.Call):
            called = above.func.attr if isinstance(above.func, ast.Attribute) else dotted(above.func)
            if called in _REPORTS:  # of whatever: `self.history[name].append(x.item())`
                return True
        if isinstance(above, ast.stmt):
            break
    return False
