"""A copy of the weights that is the weights' own memory: what is averaged into it is averaged with itself. Part of GG615."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import torch

from gradguard.diagnosis import Diagnosis, Fix
from gradguard.evidence.source import ResolvedSite, dotted, resolve
from gradguard.evidence.syntax import Source
from gradguard.fixes.edits import replaced
from gradguard.rules.incident import Incident
from gradguard.rules.protocol import tell
from gradguard.rules.protocol.books import Book
from gradguard.rules.protocol.places import the_one
from gradguard.torch_internals import storage_key

_BLENDING = frozenset({"add_", "lerp_", "copy_"})


def told(incident: Incident, book: Book, code: str, name: str) -> Diagnosis | None:
    """What holds the memory by another name, where the parameters are blended into it, and where it was put there."""
    held = {key: p for p in book.parameters() if (key := storage_key(p)) is not None}
    aliases: dict[str, list[tuple[str, torch.Tensor]]] = {}
    for path, tensor in incident.names.tensor_bindings():
        parameter = held.get(storage_key(tensor) or 0)
        holder = re.split(r"\[", path)[0]
        if parameter is None or "[" not in path or isinstance(tensor, torch.nn.Parameter) or tensor.requires_grad:
            continue
        if tensor.data_ptr() == parameter.data_ptr() and tensor.shape == parameter.shape:
            aliases.setdefault(holder, []).append((path, parameter))
    for holder, found in aliases.items():
        last = holder.rpartition(".")[2]
        place = _blended(incident, last, found)
        if place is not None:
            return _told(incident, book, holder, found, place, code, name)
    return None


def _blended(incident: Incident, holder: str, found: list[tuple[str, torch.Tensor]]) -> ResolvedSite | None:
    """The recorded in-place write to such memory, through the holder, whose operand is the very parameter."""
    for _, parameter in found:
        for write in reversed(incident.journal.writes_to(storage_key(parameter) or 0)):
            place = resolve(write.site) if write.func in _BLENDING else None
            call = None if place is None else place.call
            if place is None or place.source is None or call is None or not isinstance(call.func, ast.Attribute) or not call.args:
                continue
            receiver = place.source.flat(call.func.value)
            weighed = write.func != "add_" or ".mul_(" in receiver or any(keyword.arg == "alpha" for keyword in call.keywords)
            if weighed and re.search(rf"\b{re.escape(holder)}\[", receiver) and _is_of(incident, place, call.args[0], parameter):
                return place
    return None


def _is_of(incident: Incident, place: ResolvedSite, operand: ast.expr, parameter: torch.Tensor) -> bool:
    """Whether an operand is the variable of a loop over the parameters of a module that has this one."""
    if isinstance(operand, ast.Call) and isinstance(operand.func, ast.Attribute) and operand.func.attr == "detach":
        operand = operand.func.value
    variable = (dotted(operand) or "").removesuffix(".data")
    for above in place.source.ancestors(operand) if place.source is not None else ():
        if not isinstance(above, ast.For) or variable not in {item.id for item in ast.walk(above.target) if isinstance(item, ast.Name)}:
            continue
        for each in ast.walk(above.iter):
            if isinstance(each, ast.Attribute) and each.attr in ("parameters", "named_parameters"):
                owner = (dotted(each.value) or "").rpartition(".")[2]
                modules = [module for path, module in incident.names.modules if path is not None and path.rpartition(".")[2] == owner]
                return any(parameter is p for module in modules for p in module.parameters())
    return False


def _told(
    incident: Incident, book: Book, holder: str, found: list[tuple[str, torch.Tensor]], place: ResolvedSite, code: str, name: str
) -> Diagnosis:
    parameters = [parameter for _, parameter in found]
    optimizer = tell.optimizer_name(book, incident)
    last = holder.rpartition(".")[2]
    stored = the_one(incident, lambda sources: _stores(sources, last))
    label = "keeps the parameters' own memory: no copy is made"
    patch = None
    bare = None if stored is None or stored.statement is None else _bare(stored.statement)
    if stored is not None and stored.source is not None and bare is not None:
        patch = replaced(stored.source, [(bare, f"{stored.source.flat(bare)}.clone()")])
    blends = place.span("reads and writes one and the same memory", "changed" if stored is not None else "culprit")
    names = tell.parameter_names(parameters, incident.names)
    return Diagnosis(
        code=code,
        name=name,
        severity="warning",
        headline=f"`{holder}` is no copy of the weights but their own memory: what is averaged into it is the weights with themselves",
        culprit=stored.statement_span(label, "culprit") if stored is not None else blends,
        related=tell.spans(
            blends if stored is not None else None, tell.span(book.step_site, f"`{optimizer}` writes into the same memory", "context")
        ),
        tensors=tell.facts(parameters, incident.names),
        explanation=f"{len(found)} tensors in `{holder}` have the addresses of {tell.listed(names, len(names))}. `.data` and `.detach()` "
        f"give another tensor on the same memory: `{holder}` follows each step of `{optimizer}`, and writing into it changes the weights.",
        fixes=[Fix(title=f"Put a copy into `{holder}`: `.detach().clone()`", safety="unsafe", patch=patch)],
        confidence="certain" if stored is not None else "likely",
    )


def _stores(sources: list[Source], holder: str) -> Iterator[tuple[Source, ast.stmt]]:
    """`holder[key] = p.data`, `holder = {n: p.detach() for ...}`, `holder.append(p.data)`."""
    for source in sources:
        for node in ast.walk(source.tree) if source.tree is not None else ():
            if isinstance(node, (ast.Assign, ast.AnnAssign)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                bases = [dotted(target.value if isinstance(target, ast.Subscript) else target) or "" for target in targets]
            elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Attribute):
                bases = [dotted(node.value.func.value) or ""] if node.value.func.attr == "append" else []
            else:
                continue
            if any(base.rpartition(".")[2] == holder for base in bases) and _bare(node) is not None:
                yield source, node


def _bare(statement: ast.stmt) -> ast.expr | None:
    """The one `x.data` or `x.detach()` in a statement that nothing copies."""
    whole = [node for node in ast.walk(statement) if isinstance(node, ast.expr)]
    found: list[ast.expr] = [node for node in whole if isinstance(node, ast.Attribute) and node.attr == "data"]
    found += [node for node in whole if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "detach"]
    copied = any(isinstance(node, ast.Attribute) and node.attr in ("clone", "deepcopy", "copy") for node in whole)
    return found[0] if len(found) == 1 and not copied else None
