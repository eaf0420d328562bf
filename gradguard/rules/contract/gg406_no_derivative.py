"""# GG406 no-derivative

## What it is
Backward met an operation that has no derivative, or that can be differentiated once but not twice: a fused attention kernel
under a gradient penalty, a custom Function marked `@once_differentiable`, an argument PyTorch has no formula for.

## Why it is wrong
A gradient of a gradient (`create_graph=True`) differentiates the backward formulas themselves. Fused kernels and
`@once_differentiable` backwards are opaque: there is no formula to differentiate.

## Example
    out = F.scaled_dot_product_attention(q, k, v)
    grad, = torch.autograd.grad(out.sum(), q, create_graph=True)
    grad.norm().backward()

## Use instead
    with sdpa_kernel(SDPBackend.MATH):
        out = F.scaled_dot_product_attention(q, k, v)

## Fix safety
Safe for the attention kernel and for a decorator over differentiable code: the same numbers up to rounding, at more memory.

## When it speaks, what silences it
When PyTorch reports a missing derivative. The culprit is the forward line of that operation, or the decorator.
"""

from __future__ import annotations

import ast
import re
from types import FunctionType

import torch

from gradguard.analysis.graph.walk import walk
from gradguard.analysis.incident import Incident
from gradguard.analysis.live.custom_functions import FunctionView, classes_in_graph, user_functions, view_of
from gradguard.analysis.places.source import ResolvedSite
from gradguard.analysis.program.call_search import calls_in_use
from gradguard.analysis.program.expressions import inside
from gradguard.analysis.program.index import calls_in
from gradguard.analysis.program.provenance import Spot
from gradguard.analysis.program.syntax import load
from gradguard.core.diagnosis import Diagnosis, Fix, SourceSpan
from gradguard.core.safe_read import peek
from gradguard.fixes.edits import removed
from gradguard.fixes.statements import wrapped
from gradguard.instrumentation.facts import CallableRef
from gradguard.rules.base import Rule
from gradguard.rules.contract.wording import backward_called, untraced_note
from gradguard.torch_compat.private_api import grad_fn_of

_ATEN = re.compile(r"derivative for (?:aten::|')([\w: ]+?)'? is not implemented")
_ARGUMENT = re.compile(r"The function '(\w+)' is not differentiable with respect to argument '(\w+)'")
_NO_BACKWARD = "must implement either the backward or vjp method"


def recognise(incident: Incident) -> Diagnosis | None:
    if incident.says("marked with @once_differentiable"):
        return _once(incident)
    if incident.says(_NO_BACKWARD):
        return _without_backward(incident)
    argument = _ARGUMENT.search(incident.message)
    if argument is not None:
        return _argument(incident, argument[1], argument[2])
    op = _ATEN.search(incident.message)
    return None if op is None else _op(incident, op[1])


# -- @once_differentiable ---------------------------------------------------------------------------------------------


def is_once_differentiable(cls: type) -> bool:
    """Whether a Function's backward is wrapped by torch's decorator."""
    backward = peek(cls, "backward")
    inner = getattr(backward, "__wrapped__", None)
    return isinstance(inner, FunctionType) and isinstance(backward, FunctionType) and backward.__code__.co_filename.endswith("function.py")


def _once(incident: Incident) -> Diagnosis | None:
    used = {fact[4]() for fact in incident.journal.ops if type(fact[4]) is CallableRef}
    candidates = [cls for cls in (*classes_in_graph(incident), *user_functions()) if is_once_differentiable(cls)]
    traced = [cls for cls in candidates if cls in used]
    chosen = list(dict.fromkeys(traced or candidates))
    visible = [cls for cls in chosen if any(value is cls for view in incident.user_frames for value in view.globals.values())]
    chosen = visible or chosen
    related = _grad_spans(incident)
    if not chosen:
        return Diagnosis(
            code="GG406",
            name="no-derivative",
            related=related,
            headline="A gradient of a gradient passes through a custom Function whose backward is marked `@once_differentiable`.",
            explanation=_TWICE,
            fixes=[Fix(title="use an implementation whose backward is made of differentiable operations")],
            confidence="likely",
        )
    told = [_once_told(incident, cls, related) for cls in chosen]
    if len(chosen) == 1:
        return told[0]
    notes = ["Other Functions marked so: " + ", ".join(f"`{cls.__name__}`" for cls in chosen[1:4]) + "."]
    return told[0].model_copy(update={"notes": notes, "confidence": "likely", "alternatives": told})


def _once_told(incident: Incident, cls: type, related: list[SourceSpan]) -> Diagnosis:
    view = view_of(cls)
    decorator = _decorator(view)
    culprit = None
    patch = None
    if decorator is not None and view.backward is not None:
        source = view.backward.source
        culprit = Spot(view.backward, decorator).span("allows this backward to be differentiated once only", "culprit")
        patch = removed(source, decorator.lineno, decorator.end_lineno or decorator.lineno)
    opaque = _opaque(view)
    apply_spans = _apply_spans(incident, view)
    fixes = [
        Fix(
            title=f"drop `@once_differentiable` from the backward of `{view.name}`: it is made of differentiable operations",
            safety="safe",
            patch=patch,
            detail="Values that backward uses must come from `ctx.saved_tensors`, not from attributes of ctx, for the second "
            "derivative to be right.",
        )
    ]
    if opaque:
        fixes = [
            Fix(
                title=f"write the backward of `{view.name}` in differentiable operations, or as a second Function with a backward "
                "of its own, and drop the decorator",
                detail=f"It uses {opaque}, which autograd cannot look into.",
            )
        ]
    return Diagnosis(
        code="GG406",
        name="no-derivative",
        headline=f"The gradient's own gradient is wanted, but the backward of `{view.name}` is marked `@once_differentiable`.",
        culprit=culprit,
        related=[*apply_spans, *related],
        explanation=_TWICE,
        fixes=fixes,
        avoid=["`create_graph=False`: the penalty would run and give no gradient to the parameters."],
    )


_TWICE = (
    "With `create_graph=True` the backward pass is recorded, so that it can be differentiated itself. "
    "`@once_differentiable` runs a custom backward without recording, and puts an error in the place of its derivative."
)


def _decorator(view: FunctionView) -> ast.expr | None:
    function = None if view.backward is None else view.backward.function
    if function is None:
        return None
    return next((node for node in function.decorator_list if "once_differentiable" in ast.unparse(node)), None)


def _opaque(view: FunctionView) -> str | None:
    """Something in a backward that autograd cannot follow."""
    if view.backward is None:
        return None
    tree, imports = view.backward.tree, view.backward.source.imports
    leaving = [f"`.{node.attr}`" for node in inside(tree, ast.Attribute) if node.attr in ("numpy", "data", "detach", "item", "tolist")]
    arrays = ["numpy" for node in inside(tree, ast.Name) if imports.get(node.id, node.id).partition(".")[0] in ("np", "numpy", "scipy")]
    writes = ["in-place writes" for node in inside(tree, ast.AugAssign) if isinstance(node.target, ast.Subscript)]
    return next(iter([*leaving, *arrays, *writes]), None)


# -- operations without a derivative ----------------------------------------------------------------------------------

_SPELLED = {
    "_scaled_dot_product": "scaled_dot_product_attention",
    "_cdist": "cdist",
    "_embedding_bag": "embedding_bag",
    "_cudnn_rnn": "LSTM",
    "miopen_rnn": "LSTM",
    "_thnn_fused": "LSTM",
    "_ctc_loss": "ctc_loss",
    "_fused": "",
    "_efficient_attention": "scaled_dot_product_attention",
    "_flash_attention": "scaled_dot_product_attention",
}
_ALIASES = {"igamma": "gammainc", "igammac": "gammaincc", "special_zeta": "zeta"}
_MODULE_OF = {
    "scaled_dot_product_attention": (
        "MultiheadAttention",
        "TransformerEncoderLayer",
        "TransformerDecoderLayer",
        "TransformerEncoder",
        "Transformer",
    ),
    "embedding_bag": ("EmbeddingBag",),
    "LSTM": ("LSTM", "GRU", "RNN"),
    "ctc_loss": ("CTCLoss",),
    "multilabel_margin_loss": ("MultiLabelMarginLoss",),
}


def plain_name(aten: str) -> str:
    """What a user calls the op: `_scaled_dot_product_flash_attention_for_cpu_backward` -> `scaled_dot_product_attention`."""
    aten = aten.split(":")[0].strip()
    for prefix, name in _SPELLED.items():
        if aten.startswith(prefix) and name:
            return name
    return re.sub(r"(_backward|_double_backward)+$", "", aten).lstrip("_")


def _op(incident: Incident, aten: str) -> Diagnosis | None:
    name = plain_name(aten)
    second = "backward" in aten
    place, traced = _forward_place(incident, aten, name)
    culprit = None
    notes = []
    if place is not None:
        verb = "can be differentiated once only" if second else "has no derivative"
        culprit = place.span(f"`{name}` {verb}", "culprit")
    else:
        found = calls_in_use(incident, name, _MODULE_OF.get(name, ())) or calls_in_use(incident, _ALIASES.get(name, name))
        if found:
            spot = found[0]
            culprit = spot.span(f"`{name}` has no second derivative here" if second else f"`{name}` has no derivative", "culprit")
            notes.append(untraced_note(f"the call of `{name}`"))
            if len(found) > 1:
                notes.append("It is called in other places too: " + ", ".join(f"line {other.line}" for other in found[1:4]) + ".")
    attention = name == "scaled_dot_product_attention"
    patch = _under_math_backend(culprit) if attention else None
    if attention:
        fixes = [
            Fix(
                title="use the math backend, which is twice differentiable: `with sdpa_kernel(SDPBackend.MATH):` around the forward pass",
                safety="safe",
                detail="`from torch.nn.attention import SDPBackend, sdpa_kernel`; the block must be open while the forward runs, "
                "not the backward. "
                "Only the passes that a gradient penalty goes through need it.",
                patch=patch,
            )
        ]
    elif second:
        fixes = [
            Fix(title=f"write `{name}` with elementary operations where the second derivative goes through it"),
            Fix(title="take the penalty's gradient with respect to a tensor behind it, so that it is not passed twice"),
            Fix(title="where the first gradient may be taken as a constant, such as in a first-order inner step: leave out `create_graph`"),
        ]
    else:
        fixes = [Fix(title=f"replace `{name}` by a differentiable expression, or detach its input if no gradient is wanted through it")]
    penalty = _assigned_by_grad(incident)
    wanted = f" It is needed for `{penalty}`." if penalty else ""
    twice = (
        f"The derivative of `{name}` exists, but PyTorch has no derivative of that derivative ({aten}). Asking for a gradient "
        "of a gradient, as a gradient "
        f"penalty does, needs it.{wanted}"
    )
    once = f"PyTorch has no derivative formula for {aten}."
    return Diagnosis(
        code="GG406",
        name="no-derivative",
        headline=f"The gradient's own gradient is wanted, but `{name}` can be differentiated only once."
        if second
        else f"`{name}` has no derivative, and the loss depends on it.",
        culprit=culprit,
        related=_grad_spans(incident) if second else backward_called(incident),
        explanation=twice if second else once,
        notes=notes,
        fixes=fixes,
        avoid=["`create_graph=False`: the penalty would then be a constant without effect."] if second else [],
        confidence="certain" if traced else "likely",
    )


def _under_math_backend(culprit: SourceSpan | None) -> str | None:
    """The diff that runs the statement with attention's math backend."""
    source = None if culprit is None else load(culprit.file)
    statement = None if source is None or culprit is None else source.statement_at(culprit.line)
    if source is None or not isinstance(statement, (ast.Assign, ast.AnnAssign, ast.Expr, ast.Return)):
        return None
    known = source.imports.get("sdpa_kernel") and source.imports.get("SDPBackend")
    imports = None if known else "from torch.nn.attention import SDPBackend, sdpa_kernel"
    return wrapped(source, [statement], "with sdpa_kernel(SDPBackend.MATH):", imports)


def _forward_place(incident: Incident, aten: str, name: str) -> tuple[ResolvedSite | None, bool]:
    """The user's line that ran the op: through the graph's nodes and the traced calls."""
    camel = "".join(part.capitalize() for part in re.sub(r"_backward$", "", aten.split(":")[0].strip()).split("_"))
    plain = name.replace("_", "").lower()
    for node, _ in walk(incident.root_nodes, limit=50_000):
        label = node.name().split("::")[-1]
        bare = re.sub(r"Backward\d*$", "", label)
        if bare == camel or (label == "NotImplemented" and "backward" not in aten) or bare.lower() == plain:
            place = incident.place_of_node(int(node._sequence_nr()))
            if place is not None and not _is_grad_call(place):
                return place, True
    for fact in reversed(incident.journal.ops) if incident.traced else ():
        called = getattr(fact[4], "__name__", "")
        if (
            called == name
            or called.lstrip("_") == name
            or (name == "scaled_dot_product_attention" and called == "multi_head_attention_forward")
        ):
            place = incident.place_of_node(fact[0])
            if place is not None:
                return place, True
    return None, False


def _is_grad_call(place: ResolvedSite) -> bool:
    return place.callee is not None and place.callee.rpartition(".")[2] in ("grad", "backward")


def _argument(incident: Incident, function: str, argument: str) -> Diagnosis | None:
    place = incident.place
    name = re.sub(r"_forward$", "", function)
    culprit = None if place is None else place.span(f"`{argument}` of `{name}` requires grad", "culprit")
    given = place.keywords.get(argument) if place is not None else None
    shown = f"`{given}`" if given else f"`{argument}`"
    return Diagnosis(
        code="GG406",
        name="no-derivative",
        headline=f"`{name}` has no derivative with respect to its argument `{argument}`, but {shown} requires grad.",
        culprit=culprit,
        explanation=f"PyTorch has no formula for this argument's gradient, so `{argument}` must not require one.",
        fixes=[
            Fix(
                title=f"detach it: `{argument}={given or argument}.detach()`",
                safety="unsafe",
                detail="It then gets no gradient from this loss.",
            ),
            Fix(title=f"write `{name}` with elementary operations if `{argument}` is to be trained"),
        ],
    )


def _without_backward(incident: Incident) -> Diagnosis | None:
    candidates = [cls for cls in classes_in_graph(incident) if peek(cls, "backward") is peek(torch.autograd.Function, "backward")]
    if not candidates:
        return None
    view = view_of(candidates[0])
    culprit = view.header("forward", "this Function has a forward only", "culprit")
    return Diagnosis(
        code="GG406",
        name="no-derivative",
        headline=f"`{view.name}` has no `backward`, and the loss was computed through it.",
        culprit=culprit,
        related=backward_called(incident),
        explanation="A custom Function is opaque to autograd: without a `backward` there is no derivative.",
        fixes=[
            Fix(
                title=f"write `@staticmethod def backward(ctx, grad_out)` for `{view.name}`, returning one gradient for each "
                "input of forward"
            ),
            Fix(title="make it a plain Python function if autograd can differentiate what it does"),
        ],
    )


# -- the rest of the story --------------------------------------------------------------------------------------------


def _grad_spans(incident: Incident) -> list[SourceSpan]:
    """The `autograd.grad(create_graph=True)` whose result is differentiated again, and the failing call."""
    from gradguard.analysis.places.source import resolve

    spans = []
    for call in reversed(incident.journal.backwards):
        if call.create_graph and call is not incident.call and call.step == incident.journal.step:
            place = resolve(call.site)
            if place is not None:
                spans.append(place.span("the backward pass is recorded here (`create_graph=True`), to be differentiated again", "made"))
            break
    return spans + backward_called(incident)


def _assigned_by_grad(incident: Incident) -> str | None:
    """A variable around the failing call that depends on the recorded gradient: the penalty by its name."""
    place = incident.place
    if place is None or place.source is None:
        return None
    seqs = [call.seq for call in incident.journal.backwards if call.create_graph and call is not incident.call]
    for name, tensor in incident.names.tensor_bindings():
        node = grad_fn_of(tensor) if not name.startswith("grad") else None
        if node is None or not seqs or tensor.numel() != 1 or tensor in incident.roots:
            continue
        if int(node._sequence_nr()) >= seqs[-1]:
            return name
    return None


def _apply_spans(incident: Incident, view: FunctionView) -> list[SourceSpan]:
    for fact in reversed(incident.journal.ops):
        if type(fact[4]) is CallableRef and fact[4]() is view.cls:
            place = incident.place_of_node(fact[0])
            return [] if place is None else [place.span(f"`{view.name}` is used here", "made")]
    calls = calls_in(incident.sources, f"{view.name}.apply")
    return [source.span_of(call, f"`{view.name}` is used here") for source, call in calls[:1]]


RULE = Rule(
    code="GG406",
    name="no-derivative",
    summary="backward met an operation without a derivative (or without a second one)",
    recognise=recognise,
    priority=50,
    messages=("is not implemented", "@once_differentiable", "is not differentiable with respect to argument", _NO_BACKWARD),
)
