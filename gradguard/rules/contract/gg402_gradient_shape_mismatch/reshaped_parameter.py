"""Parameters whose `.data` was given another shape while a graph remembers the old one. Part of GG402."""

from __future__ import annotations

import ast
import re
from typing import Any

import torch

from gradguard.analysis.graph.walk import is_accumulate, nodes_from
from gradguard.analysis.incident import Incident
from gradguard.analysis.places.source import ResolvedSite, at_line, resolve
from gradguard.analysis.program.index import writes_in
from gradguard.analysis.program.syntax import Source
from gradguard.core.diagnosis import Diagnosis, Fix, SourceSpan, TensorFacts
from gradguard.fixes.edits import replaced
from gradguard.torch_compat.private_api import output_metadata, storage_key

Found = tuple[Source, ast.Assign, str]  # a statement `owner.data = ...`, and the owner as written


def reshaped(incident: Incident, index: int, got: list[int] | None, wanted: list[int] | None) -> Diagnosis | None:
    """The leaf whose graph node expects the shape that PyTorch wants, while the leaf has the shape of the gradient by now."""
    nodes = nodes_from(incident.root_nodes)
    changed: dict[Any, torch.Tensor] = {node: node.variable for node in nodes if is_accumulate(node) and _differs(node)}
    leaf = None
    for node in nodes:
        source = node.next_functions[index][0] if index < len(node.next_functions) else None
        if source in changed and list(output_metadata(source) or ()) == wanted and list(changed[source].shape) == got:
            leaf = changed[source]
            break
    if leaf is None:
        return None
    name = incident.names.leaf(leaf)
    shown = f"`{name}`" if name else "a leaf"
    culprit, others, written = where_reshaped(incident, leaf, name)
    related: list[SourceSpan] = [place.statement_span("this may have done it: it gives a `.data` another tensor") for place in others]
    if incident.place is not None:
        related.append(incident.place.span("backward was called here", "backward"))
    names = {other for item in changed.values() if (other := incident.names.leaf(item))}
    return Diagnosis(
        code="GG402",
        name="gradient-shape-mismatch",
        headline=f"{shown if name else 'A leaf'} was given another shape through `.data`: the graph still has {wanted}, the gradient is"
        f" {got}.",
        culprit=None if culprit is None else culprit.statement_span(f"`.data` of {shown} gets another shape here: {got}", "culprit"),
        related=related,
        tensors=[TensorFacts(name=name, kind="parameter" if isinstance(leaf, torch.nn.Parameter) else "tensor", shape=got)],
        explanation="Assigning to `.data` puts another tensor into the same parameter, and autograd is not told. The node that gathers"
        f" its gradient was made for shape {wanted} and stays in use as long as any graph with it is alive, such as the one behind the"
        " last loss.",
        notes=[f"the same holds for {len(changed) - 1} other parameters"] if len(changed) > 1 else [],
        fixes=_fixes(written, names),
        confidence="certain" if culprit is not None else "likely",
    )


def _differs(node: Any) -> bool:
    shape = output_metadata(node)
    return shape is not None and tuple(node.variable.shape) != shape


def where_reshaped(incident: Incident, leaf: torch.Tensor, name: str | None) -> tuple[ResolvedSite | None, list[ResolvedSite], list[Found]]:
    """The assignment to `.data` of this leaf, else those that may be it; and all statements of that kind around."""
    writes = writes_in(incident.sources, "data")
    found = [
        (source, write.node, owner)
        for source, write in writes
        if isinstance(write.node, ast.Assign) and write.owner is not None and (owner := source.segment(write.owner)) is not None
    ]
    key = storage_key(leaf)
    seen = [fact for fact in (incident.journal.writes_to(key) if key is not None else ()) if fact.func == "data"]
    recorded = (at for fact in reversed(seen) if (at := resolve(fact.site)) is not None)
    # the memory may have been another tensor's before, with another name
    place = next((at for at in recorded if name is None or "." not in (at.receiver or "") or _is_named(at.receiver or "", name)), None)
    if place is not None:
        return place, [], found
    mine = [item for item in found if name is not None and _is_named(item[2], name)] or found
    places = [at for source, node, _ in mine if (at := at_line(source.filename, node.lineno)) is not None]
    return (places[0], [], found) if len(places) == 1 else (None, places[:3], found)


def _is_named(owner: str, name: str) -> bool:
    """Whether `net.conv.weight` (or `net[2].weight`), as written, can be the parameter `model.conv.weight` (`model.2.weight`)."""
    written, path = re.sub(r"\[[\"']?(\w+)[\"']?\]", r".\1", owner).split("."), name.split(".")
    few = min(len(written), len(path)) - (written[0] != path[0])
    return few > 0 and written[-few:] == path[-few:]


def _fixes(written: list[Found], names: set[str]) -> list[Fix]:
    """A new parameter in place of the new data: where every statement concerned shows whose it is."""
    title = "make a new parameter of that shape, `module.weight = nn.Parameter(...)`, and a new optimizer after it"
    detail = "A new parameter has a node of its own; the optimizer holds the parameters it was given, and its state has their old shapes."
    mine = [item for item in written if "." in item[2] and any(_is_named(item[2], name) for name in names)]
    sources = {id(source): source for source, _, _ in mine}
    patch = None
    if len(sources) == 1:
        source = mine[0][0]
        maker = next((f"{alias}.Parameter" for alias, full in source.imports.items() if full == "torch.nn"), None)
        maker = maker or ("torch.nn.Parameter" if source.imports.get("torch") == "torch" else None)
        if maker is not None:
            changes = [(node.targets[0], owner) for _, node, owner in mine] + [
                (node.value, f"{maker}({source.segment(node.value)})") for _, node, _ in mine
            ]
            patch = replaced(source, changes)
    return [
        Fix(title=title, safety="unsafe" if patch else "manual", patch=patch, detail=detail),
        Fix(title="let go of what keeps the old graph alive first (`del loss`)", safety="manual"),
    ]
