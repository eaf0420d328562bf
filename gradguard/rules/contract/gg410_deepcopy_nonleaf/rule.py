"""# GG410 deepcopy-nonleaf

## What it is
`copy.deepcopy` (of a model for an EMA or a target network, of a state, of a dict of results) met a tensor that is the result of
a differentiable computation.

## Why it is wrong
A computed tensor belongs to its graph, and a copy of it would belong to none: PyTorch refuses. It usually got into the copied
object because forward keeps an activation as an attribute.

## Example
    def forward(self, x):
        self.last_features = F.relu(self.conv(x))
        return self.last_features

## Use instead
        features = F.relu(self.conv(x))
        self.last_features = features.detach()
        return features

## Fix safety
Unsafe where the kept tensor is trained through later; where it is only looked at, the numbers stay the same.

## When it speaks, what silences it
When PyTorch refuses the copy. PyTorch's own text blames weight_norm whatever the cause; the culprit is the line that stored the tensor.
"""

from __future__ import annotations

import ast
from collections import deque
from typing import Any

import torch
from torch import nn

from gradguard.analysis.graph.walk import op_name
from gradguard.analysis.incident import Incident
from gradguard.analysis.places.source import ResolvedSite, resolve
from gradguard.analysis.program.expressions import last_part
from gradguard.analysis.program.index import calls_in, program_of, writes_in
from gradguard.analysis.program.provenance import Spot, stores_of
from gradguard.analysis.program.scopes import Scope, class_scopes, frame_scopes
from gradguard.analysis.program.syntax import Source
from gradguard.core.callsite import is_torch_or_own
from gradguard.core.diagnosis import Diagnosis, Fix, SourceSpan, TensorFacts
from gradguard.core.foreign_exceptions import internal_error
from gradguard.core.safe_read import UNKNOWN, peek
from gradguard.fixes.edits import replaced
from gradguard.rules.base import Rule
from gradguard.rules.contract.gg410_deepcopy_nonleaf.records import children_of, continues, is_data

_AVOID = "A custom `__deepcopy__` that skips the attribute: the graph of the last step would still be kept alive."


class _Found:
    """A computed tensor inside the copied object: its path, and the object and attribute that hold it."""

    def __init__(self, tensor: torch.Tensor, path: str, owner: Any, attribute: str | None, inside: bool) -> None:
        self.tensor, self.path, self.owner, self.attribute = tensor, path, owner, attribute
        self.inside = inside  # in a container that the attribute is


def recognise(incident: Incident) -> Diagnosis | None:
    copied, expression, place = _copied(incident)
    found = _search(copied, expression or "the copied object") if copied is not UNKNOWN else None
    if found is None:
        found = _from_traceback(incident)
    if found is None:
        return None
    spot, source_name = _store(incident, found)
    op = op_name(found.tensor.grad_fn) if found.tensor.grad_fn is not None else None
    norm = _normed(found)
    attribute = f"`{found.attribute}`" if found.attribute else "a tensor"
    culprit = None
    patch = None
    if spot is not None:
        label = (
            f"{attribute} keeps a computed tensor, with its graph"
            if norm is None
            else f"`{norm}` makes `{found.attribute}` a computed tensor"
        )
        culprit = spot.span(label, "culprit")
        patch = _patch(spot)
    related: list[SourceSpan] = []
    continued = not found.inside and norm is None and spot is not None and continues(spot, found.attribute) and is_data(copied)
    copying = place if place is not None and place.call is not None and continued else None
    if copying is not None:  # a record of what is being computed: the copy is at fault, and detaching where it is filled would cut it off
        related = [] if culprit is None else [culprit.model_copy(update={"role": "made"})]
        culprit, patch = copying.span(f"deepcopy meets `{found.path}` here, with its graph", "culprit"), None
    if found.tensor.grad_fn is not None:
        made = incident.place_of_node(int(found.tensor.grad_fn._sequence_nr()))
        if made is not None and (spot is None or not _covers(spot, made)):
            related.append(made.span(f"the tensor was made here (`{op}`)", "made"))
    if place is not None and copying is None:
        related.append(place.span(f"deepcopy meets `{found.path}` here", "context"))
    holder = type(found.owner).__name__
    where = f", an attribute of `{holder}`," if found.attribute and not isinstance(found.owner, (dict, list, tuple)) else ""
    fixes = [
        Fix(
            title=f"keep a detached tensor: `{source_name or found.attribute or 'x'}.detach()`",
            safety="unsafe",
            patch=patch,
            detail="The graph is then not kept alive from step to step either.",
        )
    ]
    if norm is not None:
        fixes = [
            Fix(title="use `torch.nn.utils.parametrizations.weight_norm` / `spectral_norm`, which can be deep-copied", safety="manual"),
            Fix(title="build a second model and `load_state_dict` it instead of deep-copying", safety="manual"),
        ]
    elif copying is not None:
        fixes = [
            Fix(
                title=f"fill the copy from detached values (`{found.path}.detach().clone()`), and leave the original as it is",
                safety="manual",
                detail="`dataclasses.replace`, or a new object of the same class, takes them",
            )
        ]
    elif found.attribute:
        fixes.append(Fix(title=f"set `{found.path}` to None before the copy, or copy by `load_state_dict`", safety="manual"))
    if found.attribute is None and isinstance(found.owner, torch.Tensor):
        fixes = [Fix(title=f"copy the values: `{expression or 'x'}.detach().clone()`", safety="unsafe")]
    return Diagnosis(
        code="GG410",
        name="deepcopy-nonleaf",
        headline=f"`deepcopy` cannot copy `{found.path}`: it{where} holds a computed tensor{f' (made by `{op}`)' if op else ''}, "
        "which belongs to a graph.",
        culprit=culprit,
        related=related,
        tensors=[TensorFacts(name=found.path, shape=list(found.tensor.shape), dtype=str(found.tensor.dtype), requires_grad=True)],
        explanation="Only leaves can be deep-copied: a copy of a computed tensor would belong to no graph. "
        + (
            "The old weight_norm recomputes the weight in each forward, so it is never a leaf."
            if norm
            else f"`{found.path}` is as it was computed, and leads back into the graph of that computation."
            if copying is not None
            else "Whatever forward stores on an object stays there with its whole graph, also after the step."
        ),
        notes=[] if norm else ["PyTorch's text suspects weight_norm; the error is not owed to it."],
        fixes=fixes,
        avoid=[] if norm or copying is not None else [_AVOID],
        confidence="certain" if culprit is not None else "likely",
    )


def _covers(spot: Spot, made: ResolvedSite) -> bool:
    end = getattr(spot.node, "end_lineno", None) or spot.line
    return spot.file == made.file and spot.line <= made.line <= end


def _copied(incident: Incident) -> tuple[Any, str | None, ResolvedSite | None]:
    """The object handed to deepcopy, as an expression and as itself."""
    place = incident.place
    scopes = frame_scopes(incident.frames)
    value: Any = UNKNOWN
    text = None
    if (
        place is not None
        and place.call is not None
        and place.source is not None
        and scopes
        and last_part(place.call) in ("deepcopy", "AveragedModel", "clone")
    ) and place.call.args:
        text = place.source.flat(place.call.args[0])
        value = scopes[0].evaluate(place.call.args[0])
    if value is UNKNOWN:
        for view in reversed(incident.all_frames):
            if view.code_name == "deepcopy" and view.frame.f_code.co_filename.endswith("copy.py"):
                value = view.locals.get("x", UNKNOWN)
                break
    if value is not UNKNOWN:
        text = incident.names.of(value) or text
    return value, text, place


def _computed(value: Any) -> bool:
    try:
        return isinstance(value, torch.Tensor) and not value.is_leaf
    except internal_error():
        return False


def _search(root: Any, name: str) -> _Found | None:
    """Breadth first through modules, instances and containers, for a computed tensor."""
    if _computed(root):
        return _Found(root, name, root, None, False)
    queue: deque[tuple[Any, str, Any, str | None]] = deque([(root, name, root, None)])
    seen: set[int] = set()
    while queue and len(seen) < 200_000:
        item, path, owner, attribute = queue.popleft()
        if id(item) in seen or isinstance(item, (type, str, bytes)) or item is None:
            continue
        seen.add(id(item))
        for child, step, key in children_of(item):
            child_owner, child_attribute = (item, key) if key is not None else (owner, attribute)
            if _computed(child):
                return _Found(child, path + step, child_owner, child_attribute, key is None)
            if isinstance(child, torch.Tensor) or (callable(child) and not isinstance(child, nn.Module)):
                continue
            queue.append((child, path + step, child_owner, child_attribute))
    return None


def _from_traceback(incident: Incident) -> _Found | None:
    for view in incident.all_frames:
        if view.code_name == "__deepcopy__" and is_torch_or_own(view.frame.f_code.co_filename):
            tensor = view.locals.get("self")
            if isinstance(tensor, torch.Tensor) and _computed(tensor):
                return _Found(tensor, incident.names.tensor(tensor) or "a tensor", tensor, None, False)
    return None


def _store(incident: Incident, found: _Found) -> tuple[Spot | None, str | None]:
    """The statement that put the tensor there, and what it put there as written."""
    if found.attribute is None:
        return _definition(incident, found)
    spots: list[Spot] = []
    if _normed(found):
        normed = calls_in(incident.sources, "weight_norm", "spectral_norm")
        return (_spot(*normed[0]) if normed else None), None
    if found.inside:
        spots = _grown(found)
    if not spots and not isinstance(found.owner, (dict, list, tuple)):
        spots = [
            spot
            for spot in stores_of(found.owner, found.attribute)
            if not isinstance(spot.node, (ast.Constant, ast.List, ast.Dict)) or not found.inside
        ]
        spots = [spot for spot in spots if not isinstance(spot.node, ast.Constant)]
    if not spots:
        spots = _outside(incident, found.attribute)
    spots = [spot for spot in spots if not _detached(spot.node)] or spots
    if len(spots) > 1 and found.tensor.grad_fn is not None:
        made = incident.place_of_node(int(found.tensor.grad_fn._sequence_nr()))
        near = [
            spot
            for spot in spots
            if made is not None
            and made.file == spot.file
            and made.enclosing_function in (spot.scope.tree, *spot.scope.source.ancestors(spot.node))
        ]
        spots = near or spots
    if not spots:
        return None, None
    spot = spots[-1]
    statement = spot.statement
    if statement is not None and spot.name is not None and isinstance(statement, ast.Assign):
        return Spot(spot.scope, statement, spot.name), spot.text
    return spot, spot.text if not isinstance(spot.node, ast.stmt) else None


def _detached(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("detach", "item", "numpy")


def _spot(source: Source, node: ast.expr | ast.stmt, name: str | None = None) -> Spot:
    return Spot(Scope(source, source.tree or ast.Module([], [])), node, name)


def _grown(found: _Found) -> list[Spot]:
    """`self.history.append(x)`, `self.cache[key] = x` in the owner's methods."""
    spots = []
    for scope in class_scopes(found.owner):
        program, first = program_of(scope.source), scope.parameters()[:1]
        growths = program.grows(f"{first[0]}.{found.attribute}", scope.tree) if program is not None and first else []
        spots += [Spot(scope, growth.node) for growth in growths]
    return spots


def _outside(incident: Incident, attribute: str) -> list[Spot]:
    """Assignments to an attribute of that name on anything, in the user's files (a hook that stores on the module, say)."""
    writes = writes_in(incident.sources, attribute)
    return [_spot(source, write.node, attribute) for source, write in writes if not isinstance(write.value, ast.Constant)]


def _definition(incident: Incident, found: _Found) -> tuple[Spot | None, str | None]:
    """For a copied tensor, list or dict of local variables: the line that made the tensor, or the call itself."""
    made = None
    if found.tensor.grad_fn is not None:
        made = incident.place_of_node(int(found.tensor.grad_fn._sequence_nr()))
    place = resolve(incident.site)
    if found.owner is found.tensor and place is not None and place.source is not None and isinstance(place.node, ast.expr):
        return Spot(Scope(place.source, ast.Module([], [])), place.node), None
    base = found.path.partition("[")[0].partition(".")[0]
    for scope in frame_scopes(incident.frames):
        program = program_of(scope.source)
        if program is None:
            continue
        grown = [Spot(scope, growth.node) for growth in program.grows(base, scope.tree)]
        filled = [
            Spot(scope, statement, base)
            for each in program.definitions(base, scope.tree)
            if isinstance(each.value, (ast.Dict, ast.List, ast.Tuple))
            and any(ast.iter_child_nodes(each.value))
            and (statement := program.source.statement(each.node)) is not None
        ]
        spots = sorted([*grown, *filled], key=lambda spot: spot.line)
        if spots:
            return spots[0], None
    if made is not None and made.source is not None and isinstance(made.node, ast.expr):
        return Spot(Scope(made.source, ast.Module([], [])), made.node), None
    return None, None


def _normed(found: _Found) -> str | None:
    """Whether the old weight_norm or spectral_norm recomputes this attribute: it keeps `<name>_g` or `<name>_orig` beside it."""
    if not isinstance(found.owner, nn.Module) or found.attribute is None or peek(found.owner, found.attribute) is UNKNOWN:
        return None
    parameters = found.owner._parameters
    if f"{found.attribute}_g" in parameters and f"{found.attribute}_v" in parameters:
        return "weight_norm"
    return "spectral_norm" if f"{found.attribute}_orig" in parameters else None


def _patch(spot: Spot) -> str | None:
    node: ast.AST = spot.node
    value: ast.expr | None = None
    if isinstance(node, ast.Assign):
        if len(node.targets) > 1 or isinstance(node.value, (ast.Tuple, ast.List, ast.Dict)):
            return None
        value = node.value
    elif isinstance(node, ast.Call) and last_part(node) in ("append", "add", "appendleft") and len(node.args) == 1:
        value = node.args[0]
    if not isinstance(value, (ast.Name, ast.Attribute, ast.Call, ast.Subscript)):
        return None
    return replaced(spot.scope.source, [(value, f"{spot.scope.source.segment(value)}.detach()")])


RULE = Rule(
    code="GG410",
    name="deepcopy-nonleaf",
    summary="deepcopy met a computed tensor",
    recognise=recognise,
    priority=50,
    messages=("support the deepcopy protocol",),
)
