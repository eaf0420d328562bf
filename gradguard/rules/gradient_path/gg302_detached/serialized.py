"""GG302, the other way round: a tensor with a graph is sent to another process."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

import torch

from gradguard.analysis.history import follower as follow
from gradguard.analysis.history.flows import given_back
from gradguard.analysis.incident import Incident
from gradguard.analysis.live.frames import FrameView
from gradguard.analysis.places.sites import function_word, same_place, site_at
from gradguard.analysis.places.source import ResolvedSite, resolve
from gradguard.analysis.program.expressions import inside
from gradguard.analysis.program.search_scopes import Scope, definitions, entry_by_name, entry_of, evaluate
from gradguard.core.diagnosis import Diagnosis, Fix, SourceSpan
from gradguard.core.safe_read import attributes, elements, pairs
from gradguard.fixes.edits import replaced
from gradguard.rules.gradient_path import lost_path
from gradguard.torch_compat.private_api import node_sequence

_INDEX = re.compile(r"\[(\d+)\]$")
MESSAGES = ("cowardly refusing to serialize non-leaf tensor",)


def recognise(incident: Incident) -> Diagnosis | None:
    """The tensor that cannot travel, and where it was put into the message."""
    found = _culprit(incident)
    if found is None:
        return None
    tensor, label, view, name = found
    place = resolve(view.site)
    made = incident.place_of_node(node_sequence(tensor.grad_fn))
    put = _put(incident, view, name, label)
    node, site = put if put is not None else (None, None)
    if label and "[" in label and isinstance(node, (ast.Name, ast.Attribute)) and site is not None and site.text:
        label = site.text
    what = f"`{label}`" if label else "a tensor"
    related: list[SourceSpan] = []
    culprit = site.span(f"{what} goes into the message with its graph", "culprit") if site is not None else None
    if made is not None and not same_place(made, site):
        related.append(made.span(f"{made.targets[0] if made.targets else label} is computed here, with its graph", "made"))
    sent = place.callee if place is not None and place.callee else "the queue"
    if place is not None and not same_place(place, site):
        related.append(place.span("is sent to another process here", "backward"))
    if culprit is None and place is not None:
        culprit = place.span(f"sends {what} with its graph", "culprit")
        related = [span for span in related if span.role != "backward"]
    patch = None
    if site is not None and site.source is not None and isinstance(node, (ast.Name, ast.Attribute)):
        patch = replaced(site.source, [(node, site.source.flat(node) + ".detach()")])
    container = f" of `{name}`" if name and label and name != label else ""
    return Diagnosis(
        code="GG302", name="detached", headline=f"{what}{container} is sent to another process with its graph "
                                                f"(`{sent}`){function_word(site)}: it must be detached first",
        culprit=culprit, related=related, tensors=[lost_path.facts(label, tensor)],
        explanation="A graph lives in the process that made it. Only the values of a tensor can be sent (queues, pipes, `spawn` "
                    "arguments), "
                    "so PyTorch refuses tensors that are the result of recorded operations.",
        fixes=[Fix(title=f"Put {f'`{label}.detach()`' if label and label.isidentifier() else 'a detached tensor'} into "
                         f"the message", safety="safe", patch=patch,
                   detail="Or compute what is only sent under `torch.no_grad()`, which also saves the graph's memory.")],
        avoid=["Sending under `no_grad` changes nothing: the tensor has its graph already."],
    )  # fmt: skip


def _culprit(incident: Incident) -> tuple[torch.Tensor, str | None, FrameView, str] | None:
    """The first non-leaf in the arguments of the user's sending call: (tensor, its name, the frame, the variable it is in)."""
    for level, view in enumerate(incident.user_frames[:6]):
        place = resolve(view.site)
        scope = follow.Follower(incident).live(level)
        call = place.call if place is not None else None
        if scope is None or call is None:
            continue
        for argument in (*call.args, *(keyword.value for keyword in call.keywords)):
            value = evaluate(argument, scope)
            text = scope.source.flat(argument)
            for label, tensor in _non_leaves(value, text, 0):
                return tensor, label, view, text
            if isinstance(argument, (ast.Tuple, ast.List, ast.Dict)):
                for part in inside(argument, ast.Name, ast.Attribute):
                    for label, tensor in _non_leaves(evaluate(part, scope), scope.source.flat(part), 0):
                        return tensor, label, view, text
    return None


def _non_leaves(value: Any, name: str, depth: int) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        if value.requires_grad and not value.is_leaf:
            yield name, value
    elif depth < 4 and isinstance(value, dict):
        for key, item in pairs(value, 256):
            yield from _non_leaves(item, key if type(key) is str else name, depth + 1)
    elif depth < 4 and isinstance(value, (list, tuple)):
        for i, item in enumerate(elements(value, 256)):
            yield from _non_leaves(item, f"{name}[{i}]", depth + 1)
    elif depth < 4 and not isinstance(value, torch.nn.Module):
        for key, item in list(attributes(value).items())[:64]:
            yield from _non_leaves(item, key, depth + 1)


def _put(incident: Incident, view: FrameView, name: str, label: str | None) -> tuple[ast.expr, ResolvedSite] | None:
    """Where the tensor is put into the message: the dict, tuple or list that is built, in this function or the one that returned it."""
    follower = follow.Follower(incident)
    level = next((i for i, other in enumerate(incident.user_frames) if other is view), 0)
    scope = follower.live(level)
    place = resolve(view.site)
    if scope is None or place is None or place.node is None:
        return None
    for _ in range(4):
        for definition in definitions(scope, name.split("[")[0].split(".")[0], place.node if scope.level == level else scope.function):
            found = _in_value(definition.value, scope, label, 0)
            if found is not None:
                return found
        argument = follower.argument(name, scope)
        if argument is None:
            break
        scope, expression = argument
        name = scope.source.flat(expression)
        found = _in_value(expression, scope, label, 0)
        if found is not None:
            return found
    if place.call is not None:
        for argument_node in place.call.args:
            found = _in_value(argument_node, scope, label, 0)
            if found is not None:
                return found
    return None


def _in_value(node: ast.expr, scope: Scope, label: str | None, depth: int) -> tuple[ast.expr, ResolvedSite] | None:
    source = scope.source
    if isinstance(node, ast.Dict):
        for key, value in zip(node.keys, node.values, strict=True):
            if isinstance(key, ast.Constant) and key.value == label:
                return value, site_at(source, value)
    if isinstance(node, (ast.Tuple, ast.List)):
        index = _INDEX.search(label or "")
        if index and int(index[1]) < len(node.elts):
            element = node.elts[int(index[1])]
            return element, site_at(source, element)
        for element in node.elts:
            if source.flat(element) == label:
                return element, site_at(source, element)
    if isinstance(node, ast.Call):
        for keyword in node.keywords:
            if keyword.arg == label:
                return keyword.value, site_at(source, keyword.value)
        for element in node.args:
            if source.flat(element) == label:
                return element, site_at(source, element)
        entry = entry_of(evaluate(node.func, scope)) or entry_by_name(node.func, scope)
        if entry is not None and depth < 4:
            inner = Scope(entry.source, entry.function, {}, entry.globals, depth=depth + 1)
            for value_node in given_back(entry.function):
                if value_node is not None:
                    found = _in_value(value_node, inner, label, depth + 1)
                    if found is not None:
                        return found
                    if isinstance(value_node, ast.Name):
                        for definition in definitions(inner, value_node.id, value_node):
                            found = _in_value(definition.value, inner, label, depth + 1)
                            if found is not None:
                                return found
    return None
