"""Finding a call of the user's that set the scene: around the incident first, then anywhere in the user's files."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from gradguard.analysis.incident import Incident
from gradguard.analysis.places.source import module_ast, span_of
from gradguard.analysis.program.expressions import last_part
from gradguard.core.diagnosis import Role, SourceSpan


def user_files(incident: Incident) -> list[str]:
    """The user's files around an incident, the innermost first."""
    seen: dict[str, None] = {}
    for view in incident.user_frames:
        seen.setdefault(view.frame.f_code.co_filename, None)
    return list(seen)


def calls(incident: Incident, name: str) -> Iterator[tuple[str, ast.Call]]:
    """Every call in those files whose callee's last part is `name`."""
    for file in user_files(incident):
        tree = module_ast(file)
        if tree is None:
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and last_part(node.func) == name:
                yield file, node


def compilations(incident: Incident) -> list[tuple[str, ast.Call]]:
    """The calls of torch.compile (also as `module.compile()`) in the innermost file that has any."""
    found = [(file, call) for file, call in calls(incident, "compile") if not ast.unparse(call.func).startswith(("re.", "regex."))]
    return [(file, call) for file, call in found if file == found[0][0]]


def only(found: list[tuple[str, ast.Call]], label: str, role: Role = "declared") -> SourceSpan | None:
    """The span of a call, if there is just one: of several nobody can say which."""
    return span_of(found[0][0], found[0][1], label=label, role=role) if len(found) == 1 else None
