"""A copy of the weights that is the weights' own memory: what is averaged into it is averaged with itself. Part of GG615."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import torch

from gradguard.analysis.incident import Incident
from gradguard.analysis.places.source import ResolvedSite, at_line, dotted, resolve
from gradguard.analysis.program.syntax import Source
from gradguard.core.diagnosis import Diagnosis, Fix
from gradguard.core.safe_read import parameters_in
from gradguard.fixes.edits import replaced
from gradguard.monitors.optimizer_books import Book
from gradguard.rules import wording
from gradguard.rules.spans import class_node
from gradguard.torch_compat.private_api import storage_key

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
        sources = _sources(incident, holder)
        place = _blended(incident, book, last, found, sources)
        if place is not None:
            return _told(incident, book, holder, found, place, sources, code, name)
    return None


def _sources(incident: Incident, holder: str) -> list[Source]:
    """Where the holder is written: its owner's class, else the files of the running functions."""
    owner = holder.rpartition(".")[0]
    kinds = [type(value) for path, value in incident.names.bindings if owner and path == owner]
    known = None if not kinds else class_node(kinds[0])
    return [known[0]] if known is not None else incident.sources


def _blended(
    incident: Incident, book: Book, holder: str, found: list[tuple[str, torch.Tensor]], sources: list[Source]
) -> ResolvedSite | None:
    """The in-place write through the holder whose operand is the very parameter: as recorded, or the only one in the source.

    A write that leaves every value as it was (`lerp_` with itself) is not recorded.
    """
    began = next((fact.clock for fact in incident.journal.steps if fact.optimizer() is book.ref()), None)
    for _, parameter in found if began is not None else ():  # the memory may have been another's before its first step
        for write in reversed(incident.journal.writes_to(storage_key(parameter) or 0, began or 0)):
            place = resolve(write.site) if write.func in _BLENDING else None
            call = None if place is None else place.call
            if (
                place is not None
                and call is not None
                and _blends(place.source, call, holder)
                and _is_of(incident, place.source, call, parameter)
            ):
                return place

    places = {
        (source.filename, statement.lineno)
        for source in sources
        for node in (ast.walk(source.tree) if source.tree is not None else ())
        if isinstance(node, ast.Call) and _blends(source, node, holder) and _is_of(incident, source, node, found[0][1])
        if (statement := source.statement(node)) is not None
    }
    return at_line(*places.pop()) if len(places) == 1 else None


def _blends(source: Source | None, call: ast.Call, holder: str) -> bool:
    """`holder[...].lerp_(p, ...)`, `holder[...].mul_(m).add_(p, alpha=...)`, `holder[...].copy_(p)`."""
    if source is None or not isinstance(call.func, ast.Attribute) or call.func.attr not in _BLENDING or not call.args:
        return False
    receiver = source.flat(call.func.value)
    weighed = call.func.attr != "add_" or ".mul_(" in receiver or any(keyword.arg == "alpha" for keyword in call.keywords)
    return weighed and re.search(rf"\b{re.escape(holder)}\[", receiver) is not None


def _is_of(incident: Incident, source: Source | None, call: ast.Call, parameter: torch.Tensor) -> bool:
    """Whether the operand is the variable of a loop over the parameters of a module that has this one."""
    operand = call.args[0]
    if isinstance(operand, ast.Call) and isinstance(operand.func, ast.Attribute) and operand.func.attr == "detach":
        operand = operand.func.value
    variable = (dotted(operand) or "").removesuffix(".data")
    for above in source.ancestors(call) if source is not None else ():
        if not isinstance(above, ast.For) or variable not in {item.id for item in ast.walk(above.target) if isinstance(item, ast.Name)}:
            continue
        for each in ast.walk(above.iter):
            if isinstance(each, ast.Attribute) and each.attr in ("parameters", "named_parameters"):
                owner = (dotted(each.value) or "").rpartition(".")[2]
                modules = [module for path, module in incident.names.modules if path is not None and path.rpartition(".")[2] == owner]
                return any(parameter is p for module in modules for p in parameters_in(module))
    return False


def _told(
    incident: Incident,
    book: Book,
    holder: str,
    found: list[tuple[str, torch.Tensor]],
    place: ResolvedSite,
    sources: list[Source],
    code: str,
    name: str,
) -> Diagnosis:
    parameters = [parameter for _, parameter in found]
    optimizer = wording.optimizer_name(book, incident)
    last = holder.rpartition(".")[2]
    stores = {(source.filename, node.lineno) for source, node in _stores(sources, last)}
    stored = at_line(*stores.pop()) if len(stores) == 1 else None
    label = "keeps the parameters' own memory: no copy is made"
    patch = None
    bare = None if stored is None or stored.statement is None else _bare(stored.statement)
    if stored is not None and stored.source is not None and bare is not None:
        patch = replaced(stored.source, [(bare, f"{stored.source.flat(bare)}.clone()")])
    blends = place.statement_span("reads and writes one and the same memory", "changed" if stored is not None else "culprit")
    names = wording.parameter_names(parameters, incident.names)
    return Diagnosis(
        code=code,
        name=name,
        severity="warning",
        headline=f"`{holder}` is no copy of the weights but their own memory: what is averaged into it is the weights with themselves",
        culprit=stored.statement_span(label, "culprit") if stored is not None else blends,
        related=wording.spans(
            blends if stored is not None else None, wording.span(book.step_site, f"`{optimizer}` writes into the same memory", "context")
        ),
        tensors=wording.facts(parameters, incident.names),
        explanation=f"{len(found)} tensors in `{holder}` have the addresses of {wording.listed(names, len(names))}. `.data` and "
        f"`.detach()` "
        f"give another tensor on the same memory: `{holder}` follows each step of `{optimizer}`, and writing into it changes the weights.",
        fixes=[
            Fix(
                title=f"Put a copy into `{holder}`: `.detach().clone()`",
                safety="unsafe",
                reason=f"what is blended into `{holder}` no longer changes the weights, and what is evaluated with it is another model",
                patch=patch,
            )
        ],
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
