"""Parameters that joined a model after its optimizer was made: the optimizer got `model.parameters()`, all there were then."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import torch

from gradguard.analysis.incident import Incident
from gradguard.analysis.places.source import at_line, dotted, resolve
from gradguard.analysis.program.syntax import FUNCTIONS, Source
from gradguard.core.diagnosis import SourceSpan
from gradguard.core.safe_read import parameters_in
from gradguard.monitors.optimizer_books import Book
from gradguard.rules.protocol.owners import Owner
from gradguard.rules.spans import in_tiers, only_one

_ADDING = frozenset({"append", "extend", "insert", "add_module", "register_module", "register_parameter", "update"})


def joined_later(book: Book, left: list[tuple[torch.Tensor, Owner]]) -> bool:
    """Whether these parameters cannot have been the model's when the optimizer was made.

    The optimizer was given `<model>.parameters()` itself and has every other parameter of the model, and nothing else.
    """
    owner = left[0][1]
    place = resolve(book.made)
    call = None if place is None else place.call
    first = None
    if call is not None:
        first = call.args[0] if call.args else next((word.value for word in call.keywords if word.arg == "params"), None)
    whole = isinstance(first, ast.Call) and isinstance(first.func, ast.Attribute) and first.func.attr == "parameters" and not first.args
    given = dotted(first.func.value) if isinstance(first, ast.Call) and isinstance(first.func, ast.Attribute) else None
    if given is None or given.rpartition(".")[2] not in ("self", (owner.variable or given).rpartition(".")[2]):
        return False  # of a part of it
    late = {id(leaf) for leaf, _ in left}
    others = {id(p) for p in parameters_in(owner.root)} - late
    return whole and owner.registered and bool(others) and others == {id(p) for p in book.parameters()}


def adding_place(incident: Incident, book: Book, owner: Owner) -> SourceSpan | None:
    """The one statement that adds the part; None where there are several or none."""
    made = resolve(book.made)
    parts = [part for part in owner.path.split(".")[:-1] if part != owner.variable] or [owner.attribute]
    for sources in in_tiers(incident):
        found = only_one(made, ((source, node) for source in sources for node in _adding(source, parts)))
        if found is not None:
            place = at_line(*found)
            return None if place is None else place.statement_span("adds them when the optimizer is there already", "declared")
    return None


def _adding(source: Source, parts: list[str]) -> Iterator[ast.stmt]:
    """Statements outside constructors that put something into the last named container, or under the last name."""
    names = [part for part in parts if not part.isdigit()][-1:]
    for node in ast.walk(source.tree or ast.Module([], [])):
        if not isinstance(node, (ast.Assign, ast.Expr)) or not names:
            continue
        around = next((above for above in source.ancestors(node) if isinstance(above, FUNCTIONS)), None)
        if isinstance(around, ast.FunctionDef) and around.name in ("__init__", "__new__", "setup", "build"):
            continue
        if isinstance(node, ast.Assign):
            targets = [target.value if isinstance(target, ast.Subscript) else target for target in node.targets]
            if any(isinstance(target, ast.Attribute) and target.attr == names[0] for target in targets):
                yield node
            continue
        call = node.value
        if not isinstance(call, ast.Call):
            continue
        receiver = call.func.value if isinstance(call.func, ast.Attribute) and call.func.attr in _ADDING else None
        into = receiver is not None and (dotted(receiver) or "").rpartition(".")[2] == names[0]
        named = any(isinstance(argument, ast.Constant) and argument.value == parts[-1] for argument in call.args[:2])
        if into or (named and (receiver is not None or dotted(call.func) == "setattr")):
            yield node
