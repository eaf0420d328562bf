"""# GG402 gradient-shape-mismatch

## What it is
A gradient does not have the shape of the thing it is the gradient of: a custom Function's backward returned one of another
shape than forward's input, `backward(gradient=...)` was given one of another shape than the output, or a parameter was given
another shape through `.data` while a graph, or its `.grad`, still has the old one.

## Why it is wrong
The gradient of a number with respect to a tensor has one entry for each entry of the tensor. PyTorch sums a gradient over
dimensions that were broadcast, and refuses everything else.

## Example
    @staticmethod
    def backward(ctx, grad_out):
        x, weight = ctx.saved_tensors
        grad_x = grad_out.reshape(-1, grad_out.shape[-1]) @ weight
        return grad_x, None

## Use instead
        return grad_x.view(x.shape), None

## Fix safety
Manual: whether to reshape, to sum over a broadcast dimension or to correct the product depends on the mathematics.

## When it speaks, what silences it
When PyTorch rejects the gradient. The culprit is the expression in backward that was returned at the index PyTorch names, or
the place where the `gradient=` argument was made; the return itself where the gradient has the shape of another input. Of
several returns it is the one that ran, as far as what the node has saved decides that. For a parameter of another shape it is
the assignment to `.data`.
"""

from __future__ import annotations

import ast
import re

import torch

from gradguard.analysis.incident import Incident
from gradguard.analysis.live.custom_functions import FunctionView, element_spot, find_function
from gradguard.analysis.places.source import dotted
from gradguard.analysis.program.expressions import argument, calls_inside, closed, inside
from gradguard.analysis.program.index import Program, program_of
from gradguard.analysis.program.provenance import Spot, operands_of, trace
from gradguard.analysis.program.scopes import Scope, frame_scopes
from gradguard.analysis.program.syntax import range_of
from gradguard.core.diagnosis import Diagnosis, Fix, SourceSpan, TensorFacts
from gradguard.fixes.edits import before, edit_of, patched, replaced
from gradguard.rules.base import Rule
from gradguard.rules.contract.gg402_gradient_shape_mismatch.gradient_order import exchanged_with, returned_in_order
from gradguard.rules.contract.gg402_gradient_shape_mismatch.reshaped_parameter import reshaped
from gradguard.rules.contract.gg402_gradient_shape_mismatch.stale_gradient import MESSAGES, of_another_shape
from gradguard.rules.contract.gg402_gradient_shape_mismatch.taken_path import Returned, returns_taken
from gradguard.rules.contract.wording import backward_called

_INVALID = re.compile(
    r"[Ff]unction (\w+?)(?:Backward)? returned an invalid gradient at index (\d+)"
    r" - (?:got (\[[^\]]*\]) but expected shape compatible with (\[[^\]]*\])|(.*))"
)
_MISMATCH = re.compile(
    r"grad_output\[(\d+)\] has a shape of torch\.Size\((\[[^\]]*\])\) and output\[\d+\] has a shape of torch\.Size\((\[[^\]]*\])\)"
)
_RESHAPES = {
    "reshape",
    "view",
    "flatten",
    "permute",
    "transpose",
    "t",
    "unsqueeze",
    "squeeze",
    "expand",
    "sum",
    "mean",
    "expand_as",
    "repeat",
}
_ASSIGN = re.compile(r"assign a gradient of size '(\[[^\]]*\])' to a tensor of size '(\[[^\]]*\])'")


def recognise(incident: Incident) -> Diagnosis | None:
    found = _INVALID.search(incident.message)
    if found is not None:
        told = reshaped(incident, int(found[2]), _sizes(found[3]), _sizes(found[4]))
        if told is not None:
            return told
        view = find_function(incident, found[1])
        return None if view is None else _from_function(incident, view, int(found[2]), found[3], found[4])
    mismatch = _MISMATCH.search(incident.message)
    if mismatch is not None:
        return _from_argument(incident, int(mismatch[1]), mismatch[2], mismatch[3])
    assigned = _ASSIGN.search(incident.message)
    return of_another_shape(incident) if assigned is None else _from_assignment(incident, assigned[1], assigned[2])


def _from_function(incident: Incident, view: FunctionView, index: int, got: str | None, expected: str | None) -> Diagnosis | None:
    inputs = view.inputs
    argument = inputs[index] if index < len(inputs) else None
    of = f"`{argument}`" if argument else f"input {index}"
    sizes, wanted = _sizes(got), _sizes(expected)
    ran = returns_taken(incident, view, index, sizes, wanted)
    made, returned = element_spot(view, index, len(inputs) or None, ran[0].value, ran[0].made) if len(ran) == 1 else (None, None)
    related = []
    culprit = None
    if len(ran) > 1 and view.backward is not None:
        related += [Spot(view.backward, item.value).span(f"one of these returned it for {of}", "context") for item in ran]
    what = f"`{made.name}`" if made is not None and made.name else "this"
    if made is not None:
        culprit = made.span(
            f"{what} is returned as the gradient of {of}: shape {got}, wanted {expected}"
            if got
            else f"{what} is returned as the gradient of {of}",
            "culprit",
        )
        if returned is not None and returned.node is not made.node:
            related.append(returned.span(f"returned at index {index}, for {of}", "context"))
    related += _reshapes(view, argument)
    header = view.header("forward", f"forward's inputs: {', '.join(inputs)}" if inputs else None)
    if header is not None:
        related.append(header)
    related += backward_called(incident)
    shapes = f"of shape {got}, but {of} has shape {expected}" if got else "that PyTorch rejects"
    fixes = []
    title = f"give {what} the shape of {of} before it is returned"
    detail = "Reshape it where forward flattened the input, or sum it over the dimensions that were broadcast."
    if sizes and wanted and len(sizes) > 1 and sizes == wanted[::-1]:
        title = f"compute {what} the other way round: it is the transpose of what {of} needs"
        detail = "Exchange the operands of its product (`g.t() @ x` for `x.t() @ g`), or return `.t()` of it; a view would mix up elements."
    elif got and expected and _elements(got) == _elements(expected) and made is not None:
        title = f"view {what} back to the shape of {of}: `{made.name or 'grad'}.view({argument or 'x'}.shape)`"
        detail = (
            f"Both have the same number of elements; keep {of}'s shape on ctx in forward (`ctx.shape = {argument or 'x'}.shape`) "
            "or take it from the saved tensor."
        )
    elif sizes and wanted and _is_part(sizes, wanted):
        part = _whole_inputs(view, ran[0], index, wanted) if len(ran) == 1 else None
        if part is not None:
            fixes.append(part)
        title = (
            f"return a gradient of the whole of {of}: `full = torch.zeros_like({argument or 'x'})`, with what was computed written into"
            " its rows"
        )
        detail = f"{what.capitalize()} has entries for a part of {of} only; the gradient of the rest is 0."
    elif got and expected:
        title = f"sum {what} over the broadcast dimensions, or correct its product, so that it has shape {expected}"
    other = exchanged_with(incident, view, index, sizes, wanted) if sizes and wanted else None
    order = returned_in_order(view, index, other) if other is not None else None
    if order is not None and other is not None:
        title, detail = f"correct the product of {what} where it stands", f"if it is the gradient of {of} all the same"
        related = [span.model_copy(update={"role": "context"}) for span in (culprit,) if span is not None] + related
        culprit = order[0].span(f"what has the shape of `{inputs[other]}` stands in the place of {of}", "culprit")
        fixes.append(order[1])
    patch = _viewed_back(view, returned, argument) if title.startswith("view ") else None
    fixes.append(Fix(title=title, safety="safe" if patch else "manual", detail=detail, patch=patch))
    return Diagnosis(
        code="GG402",
        name="gradient-shape-mismatch",
        headline=f"The backward of `{view.name}` returns for {of} (index {index}) a gradient {shapes}.",
        culprit=culprit,
        related=related,
        tensors=[
            TensorFacts(name=made.name or made.text if made else None, shape=_sizes(got)),
            TensorFacts(name=argument, shape=_sizes(expected)),
        ]
        if got
        else [],
        explanation=f"The gradients that backward returns belong, in order, to forward's inputs `{view.signature()}`, and each "
        "has the shape of its input. "
        "PyTorch sums over broadcast dimensions by itself, and refuses every other difference.",
        notes=[] if ran else ["The source of this backward is not to be had, so the returned expression is not named."],
        fixes=fixes,
        confidence="certain",
    )


def _is_part(sizes: list[int], wanted: list[int]) -> bool:
    """Whether it is the gradient of some rows only: fewer along a dimension, as many along all others."""
    return len(sizes) == len(wanted) and sizes != wanted and all(a == b or (a < b and a != 1) for a, b in zip(sizes, wanted, strict=True))


def _whole_inputs(view: FunctionView, ran: Returned, index: int, wanted: list[int]) -> Fix | None:
    """Zeros in the shapes of the inputs, where the gradients that are returned have no element at all."""
    value, inputs = ran.value, view.inputs
    elements = value.elts if isinstance(value, ast.Tuple) and len(value.elts) == len(inputs) else [value] if len(inputs) == 1 else []
    if view.backward is None or 0 not in (ran.shape(index) or ()):
        return None
    changes = []
    for i, (name, element, shape) in enumerate(zip(inputs, elements, ran.shapes, strict=False)):
        like = [name, *(part.id for part in inside(element, ast.Name) if i == index)]
        held = [(other, ran.variable(other)) for other in like]
        whole = next(((other, t) for other, t in held if t is not None and (other == name or list(t.shape) == wanted)), None)
        if shape is not None and 0 in shape and whole is not None and tuple(whole[1].shape) != shape:
            changes.append((element, f"torch.zeros_like({whole[0]})"))
    patch = replaced(view.backward.source, changes) if changes and "torch" in view.backward.source.imports else None
    if patch is None:
        return None
    texts = ", ".join(f"`{text}`" for _, text in changes)
    return Fix(title=f"return zeros in the inputs' own shapes there: {texts}", safety="unsafe", patch=patch)


def _reshapes(view: FunctionView, argument: str | None) -> list[SourceSpan]:
    """Where forward changes that input's shape, which is what backward forgot to undo."""
    if view.forward is None or argument is None:
        return []
    for call in calls_inside(view.forward.tree, *_RESHAPES):
        if any(dotted(part) == argument for part in operands_of(call, view.forward)):
            return [Spot(view.forward, call).span(f"forward changes the shape of `{argument}` here", "context")]
    return []


def _viewed_back(view: FunctionView, returned: Spot | None, argument: str | None) -> str | None:
    """The diff that keeps an input's shape on ctx, and gives the returned gradient that shape."""
    forward, backward = view.forward, view.backward
    if forward is None or forward.function is None or backward is None or returned is None or argument is None:
        return None
    source, ctx = forward.source, view.context
    names = backward.parameters()
    if view.setup is not None or ctx is None or not names or returned.scope.source is not source or not isinstance(returned.node, ast.expr):
        return None
    first = forward.function.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and len(forward.function.body) > 1:
        first = forward.function.body[1]
    edits = edit_of(returned.node, f"{closed(source, returned.node)}.view({names[0]}.{argument}_shape)")
    return patched(source, edits, [before(source, first, f"{ctx}.{argument}_shape = {argument}.shape")])


def _from_argument(incident: Incident, index: int, got: str, expected: str) -> Diagnosis | None:
    place = incident.place
    scopes = frame_scopes(incident.frames)
    call = None if place is None else place.call
    if place is None:
        return None
    root = (
        incident.names.tensor(incident.roots[index])
        if index < len(incident.roots) and isinstance(incident.roots[index], torch.Tensor)
        else None
    )
    program = program_of(place.source)
    given = _gradient_argument(program, call, index, incident.where) if call is not None and program is not None else None
    culprit = place.span(f"gradient of shape {got} for an output of shape {expected}", "culprit")
    related = []
    name = None
    if given is not None and scopes:
        name = place.source.flat(given) if place.source is not None else None
        way = trace(scopes[0], given, lambda value: str(list(value.shape)) == got if isinstance(value, torch.Tensor) else None, _makes)
        if way.origin is not None and way.origin.node is not given and range_of(way.origin.node) is not None:
            related.append(place.span(f"passed as the gradient of an output of shape {expected}", "backward"))
            culprit = way.origin.span(f"made here with shape {got}", "culprit")
    out = f"`{root}`" if root else f"output {index}"
    return Diagnosis(
        code="GG402",
        name="gradient-shape-mismatch",
        headline=f"The gradient passed in for {out}{f', `{name}`,' if name else ''} has shape {got}, but {out} has shape {expected}.",
        culprit=culprit,
        related=related,
        tensors=[TensorFacts(name=name, shape=_sizes(got)), TensorFacts(name=root, shape=_sizes(expected))],
        explanation="The starting gradient weighs each element of the output, so it has exactly the output's shape; it is not broadcast.",
        fixes=_argument_fixes(incident, given, root, got, expected),
        confidence="certain",
    )


def _argument_fixes(incident: Incident, given: ast.expr | None, root: str | None, got: str, expected: str) -> list[Fix]:
    """The same values in the output's shape where they only lie flat; else weights that fit."""
    place, sizes, wanted = incident.place, _sizes(got) or [], _sizes(expected) or []
    flat = _elements(got) == _elements(expected) and (
        sizes[:1] == wanted[:1] or 1 in (len(sizes), len(wanted)) or [n for n in sizes if n > 1] == [n for n in wanted if n > 1]
    )
    ones = Fix(title=f"make it like the output: `torch.ones_like({root or 'output'})`", safety="unsafe")
    if flat and sizes and wanted and _elements(got) > 1:
        source = None if place is None else place.source
        text = None if given is None or source is None else source.segment(given)
        plain = isinstance(given, (ast.Name, ast.Attribute, ast.Call, ast.Subscript))
        shape = f"{root}.shape" if root else expected.strip("[]")
        patch = (
            replaced(source, [(given, f"{text}.reshape({shape})")])
            if source is not None and given is not None and text and plain and root and re.fullmatch(r"[A-Za-z_][\w.]*", root)
            else None
        )
        return [
            Fix(
                title=f"give it the output's shape: `{text if text and plain else 'grad'}.reshape({shape})`",
                safety="unsafe",
                patch=patch,
                detail="Both have the same number of elements; right if they lie in the same order, as after `flatten`.",
            ),
        ]
    return [ones, Fix(title="leave it out where the output is a single number", safety="manual")]


def _makes(expr: ast.expr, scope: Scope) -> bool | None:
    return True if isinstance(expr, (ast.Call, ast.BinOp)) else None


def _gradient_argument(program: Program, call: ast.Call, index: int, where: str) -> ast.expr | None:
    method = isinstance(call.func, ast.Attribute) and call.func.attr == "backward" and not ast.unparse(call.func.value).endswith("autograd")
    words = program.keywords(call)
    named = [words[each] for each in ("gradient", "grad_tensors", "grad_outputs") if each in words]
    given = named[0] if named else argument(call, "grad_outputs", 2 if where == "grad" else 0 if method else 1)
    if isinstance(given, (ast.Tuple, ast.List)):
        return given.elts[index] if index < len(given.elts) else None
    return given


def _from_assignment(incident: Incident, got: str, expected: str) -> Diagnosis | None:
    place = incident.place
    if place is None:
        return None
    target = place.targets[0] if place.targets else None
    owner = target.removesuffix(".grad") if target else "the tensor"
    return Diagnosis(
        code="GG402",
        name="gradient-shape-mismatch",
        headline=f"A gradient of shape {got} is assigned to `{owner}.grad`, but `{owner}` has shape {expected}.",
        culprit=place.statement_span(f"shape {got} for a tensor of shape {expected}", "culprit"),
        tensors=[TensorFacts(name=owner, shape=_sizes(expected)), TensorFacts(name=target, shape=_sizes(got))],
        explanation="A gradient has one entry for each entry of its tensor.",
        fixes=[Fix(title=f"reshape or reduce the gradient to {expected} before it is assigned", safety="manual")],
    )


def _sizes(text: str | None) -> list[int] | None:
    return None if text is None else [int(n) for n in re.findall(r"\d+", text)]


def _elements(text: str) -> int:
    total = 1
    for n in _sizes(text) or []:
        total *= n
    return total


RULE = Rule(
    code="GG402",
    name="gradient-shape-mismatch",
    summary="a gradient does not have the shape of its tensor",
    recognise=recognise,
    priority=50,
    messages=("returned an invalid gradient at index", "mismatch in shape: grad_output", "assign a gradient of size", *MESSAGES),
)
