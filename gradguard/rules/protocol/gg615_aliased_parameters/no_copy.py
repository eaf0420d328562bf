"""A copy of the weights that is the weights' own memory: what is averaged into it is averaged with itself. Part of GG615."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import torch

from gradguard.analysis.incident import Incident
from gradguard.analysis.places.source import ResolvedSite, at_line, resolve
from gradguard.analysis.program.expressions import inside
from gradguard.analysis.program.index import programs_of
from gradguard.analysis.program.syntax import Source
from gradguard.core.diagnosis import Diagnosis, Fix
from gradguard.fixes.edits import replaced
from gradguard.instrumentation.facts import SelfWrite
from gradguard.monitors.findings import TraceNext
from gradguard.monitors.gradient_ledger import Ledger
from gradguard.monitors.optimizer_books import Book
from gradguard.rules import wording
from gradguard.rules.spans import class_node
from gradguard.torch_compat.private_api import storage_key

_TRACED_UNTIL = 24  # steps
_BLENDS = frozenset({"lerp_", "copy_"})  # leave what is blended with itself as it is; of `add_` that holds after a `mul_`


def told(incident: Incident, book: Book, code: str, name: str) -> Diagnosis | None:
    """What holds the memory by another name, where the parameters are blended into it, and where it was put there."""
    held = {key: p for p in book.parameters() if (key := storage_key(p)) is not None}
    blends: dict[int, SelfWrite] = {}
    for write in incident.journal.self_writes:
        target = write.target()
        if target is not None and write.storage in held and (write.func in _BLENDS or (write.func, write.previous) == ("add_", "mul_")):
            blends[id(target)] = write
    found: dict[str, list[tuple[torch.Tensor, SelfWrite]]] = {}
    aliases = False
    for path, tensor in incident.names.tensor_bindings():
        holder, item, _ = path.partition("[")
        if not item or isinstance(tensor, torch.nn.Parameter) or tensor.requires_grad:
            continue
        if id(tensor) in blends:
            found.setdefault(holder, []).append((held[blends[id(tensor)].storage], blends[id(tensor)]))
        aliases = aliases or storage_key(tensor) in held
    if aliases and not found and book.steps <= _TRACED_UNTIL:  # what is written into them later is to be seen
        incident.notes[Ledger].report([TraceNext(None)])
    for holder, blended in found.items():
        place = resolve(blended[0][1].site)
        if place is not None:
            return _told(incident, book, holder, [parameter for parameter, _ in blended], place, (code, name))
    return None


def _sources(incident: Incident, holder: str) -> list[Source]:
    """Where the holder is written: its owner's class, else the files of the running functions."""
    owner = holder.rpartition(".")[0]
    kinds = [type(value) for path, value in incident.names.bindings if owner and path == owner]
    known = None if not kinds else class_node(kinds[0])
    return [known[0]] if known is not None else incident.sources


def _told(
    incident: Incident,
    book: Book,
    holder: str,
    parameters: list[torch.Tensor],
    place: ResolvedSite,
    code: tuple[str, str],
) -> Diagnosis:
    optimizer = wording.optimizer_name(book, incident)
    last = holder.rpartition(".")[2]
    stores = {(source.filename, node.lineno) for source, node in _stores(_sources(incident, holder), last)}
    stored = at_line(*stores.pop()) if len(stores) == 1 else None
    label = "keeps the parameters' own memory: no copy is made"
    patch = None
    bare = None if stored is None or stored.statement is None else _bare(stored.statement)
    if stored is not None and stored.source is not None and bare is not None:
        patch = replaced(stored.source, [(bare, f"{stored.source.flat(bare)}.clone()")])
    elif stored is not None and stored.source is not None and isinstance(value := getattr(stored.statement, "value", None), ast.Call):
        patch = replaced(stored.source, [(value, f"{{name: value.clone() for name, value in {stored.source.flat(value)}.items()}}")])
    blends = place.statement_span("reads and writes one and the same memory", "changed" if stored is not None else "culprit")
    names = wording.parameter_names(parameters, incident.names)
    return Diagnosis(
        code=code[0],
        name=code[1],
        severity="warning",
        headline=f"`{holder}` is no copy of the weights but their own memory: what is averaged into it is the weights with themselves",
        culprit=stored.statement_span(label, "culprit") if stored is not None else blends,
        related=wording.spans(
            blends if stored is not None else None, wording.span(book.step_site, f"`{optimizer}` writes into the same memory", "context")
        ),
        tensors=wording.facts(parameters, incident.names),
        explanation=f"{len(parameters)} tensors in `{holder}` have the addresses of {wording.listed(names, len(names))}. `.data` and "
        f"`.detach()` "
        f"give another tensor on the same memory: `{holder}` follows each step of `{optimizer}`, and writing into it changes the weights.",
        fixes=[
            Fix(
                title=f"Put a copy into `{holder}`: `.detach().clone()`" if patch else f"Put copies into `{holder}`",
                safety="unsafe",
                reason=f"what is blended into `{holder}` no longer changes the weights, and what is evaluated with it is another model",
                patch=patch,
            )
        ],
        confidence="certain" if stored is not None else "likely",
    )


def _stores(sources: list[Source], holder: str) -> Iterator[tuple[Source, ast.stmt]]:
    """`holder[key] = p.data`, `holder = {n: p.detach() for ...}`, `holder.append(p.data)`, `holder = net.state_dict()`."""
    for program in programs_of(sources):
        placed = [write.node for write in program.writes(holder)]
        placed += [growth.node for growth in program.grows_in(holder)]
        for node in (*placed, *(definition.node for definition in program.definitions(holder))):
            statement = program.source.statement(node)
            if statement is not None and (_bare(statement) is not None or _hands_out(statement)):
                yield program.source, statement


def _hands_out(statement: ast.stmt) -> bool:
    """`shadow = net.state_dict()`: the values in it are on the memory of the parameters, and nothing copies them."""
    value = getattr(statement, "value", None)
    return isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr == "state_dict"


def _bare(statement: ast.stmt) -> ast.expr | None:
    """The one `x.data` or `x.detach()` in a statement that nothing copies."""
    whole = list(inside(statement, ast.expr))
    found: list[ast.expr] = [node for node in whole if isinstance(node, ast.Attribute) and node.attr == "data"]
    found += [node for node in whole if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "detach"]
    copied = any(isinstance(node, ast.Attribute) and node.attr in ("clone", "deepcopy", "copy") for node in whole)
    return found[0] if len(found) == 1 and not copied else None
