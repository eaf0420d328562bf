"""The diagnosis of a gradient that is not finite although the loss is: which op's derivative broke."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from gradguard.analysis.graph.recompute import node_kind
from gradguard.analysis.graph.unbounded_derivatives import RISKS, Held
from gradguard.analysis.graph.walk import is_accumulate, walk
from gradguard.analysis.incident import Incident
from gradguard.analysis.live.names import short_list
from gradguard.core.diagnosis import Diagnosis, Fix, SourceSpan, TensorFacts
from gradguard.core.foreign_exceptions import internal_error
from gradguard.instrumentation.facts import BrokenFact
from gradguard.monitors.numerics import Numbers
from gradguard.rules.numerics.bounding import bounded, finitely_masked, safe_inside
from gradguard.rules.numerics.ranges import elements
from gradguard.rules.numerics.spans import Places, expression, module_at
from gradguard.torch_compat.private_api import node_sequence

_CURES = {
    "Sqrt": [
        Fix(title="add a small number under the root: `(x + 1e-12).sqrt()`, or clamp: `x.clamp(min=1e-12).sqrt()`"),
        Fix(title="use `torch.linalg.vector_norm`, whose gradient at 0 is defined as 0, where this is the length of a vector"),
    ],
    "Rsqrt": [Fix(title="add a small number inside: `(x + eps).rsqrt()`")],
    "Pow": [Fix(title="clamp the base inside the power: `x.clamp(min=1e-8) ** p`")],
    "Log": [
        Fix(title="clamp the argument inside the log: `x.clamp(min=1e-8).log()`"),
        Fix(title="stay in log space (`log_softmax`, `logsigmoid`, `logsumexp`)"),
    ],
    "Acos": [
        Fix(
            title="clamp the cosine just inside: `x.clamp(-1 + 1e-7, 1 - 1e-7)`",
            detail="A clamp at exactly ±1 is not enough: the slope there is still infinite.",
        ),
        Fix(title="use `torch.atan2(sin, cos)`, which has no such edge"),
    ],
    "Div": [Fix(title="keep the divisor away from 0 before dividing: `x / d.clamp(min=eps)`, or divide by `torch.where(ok, d, 1.0)`")],
    "Exp": [Fix(title="bound the argument before exp: `torch.where(ok, x, 0.0).exp()` or `x.clamp(max=...)`")],
    "LinalgSvd": [
        Fix(
            title=(
                "break the degeneracy: start from a slightly perturbed matrix in place of an identity (`nn.init.eye_`), orthogonal or zero"
                " initialisation"
            ),
            detail="Where only the product matters, a parametrisation that needs no decomposition (`W = A @ B`) avoids it altogether.",
        ),
        Fix(title="add a small random perturbation before the decomposition, or backpropagate through the singular values only"),
    ],
    "LinalgEigh": [
        Fix(title="break the degeneracy: add a small distinct diagonal before `eigh`"),
        Fix(title="backpropagate through the eigenvalues only, or use a loss that needs no eigenvectors"),
    ],
}
_CURES["Asin"] = _CURES["Acos"]
_CURES["Log2"] = _CURES["Log10"] = _CURES["Log1P"] = _CURES["Xlogy"] = _CURES["Log"]
_CURES["PowTensor"] = _CURES["Pow"]


class _Told:
    """Noted where the first non-finite gradients were told."""


def blame(incident: Incident, numbers: Numbers) -> Diagnosis | None:
    """The diagnosis right after the backward call that left non-finite gradients; None where no parameter has one."""
    leaves = [leaf for leaf in (ref() for ref in numbers.plan.leaves) if leaf is not None]
    bad = [leaf for leaf in leaves if leaf.grad is not None and not finite(leaf.grad)]
    if not bad:
        return None
    if _Told in incident.notes and any(not finite(leaf.detach()) for leaf in leaves):
        return None  # the step that followed has made the weights NaN: what comes now is no news
    incident.notes.put(_Told())
    roots = incident.root_nodes
    nodes = [node for node, _ in walk(roots)]
    suspects = _suspects(numbers.held, {id(leaf) for leaf in bad})
    suspects.sort(key=lambda suspect: suspect[0].only_beside())  # an overflow beside 0 may be masked: what is infinite for sure comes first
    seen = _seen(incident, nodes)
    under = set() if seen is None else set(_below([seen[0]]))
    hidden = [item for item in suspects if item[0].kind in _FORWARD and item[0].node in under]
    if hidden:  # what the broken node had been given was NaN already
        suspects = hidden
    elif seen is not None:
        suspects.sort(key=lambda suspect: suspect[0].node is not seen[0])
        if not suspects or suspects[0][0].node is not seen[0]:
            return _broke(incident, numbers, nodes, seen, bad, leaves)
    if suspects:
        return _known(incident, numbers, nodes, suspects, bad, leaves)
    return _unknown(incident, numbers, nodes, bad, leaves)


def _seen(incident: Incident, nodes: list[Any]) -> tuple[Any, BrokenFact] | None:
    """The node that was seen making the first non-finite gradient of this call (level forensic)."""
    fact, call = incident.journal.broken, incident.call
    if fact is None or call is None or fact.call != call.index:
        return None
    node = next((node for node in nodes if node_sequence(node) == fact.seq and str(node.name()) == fact.name), None)
    return None if node is None else (node, fact)


def _broke(
    incident: Incident,
    numbers: Numbers,
    nodes: list[Any],
    seen: tuple[Any, BrokenFact],
    bad: list[torch.Tensor],
    leaves: list[torch.Tensor],
) -> Diagnosis:
    node, fact = seen
    places = Places(incident, numbers, nodes)
    place = places.of(node, search=True)
    text = expression(place, node)
    where_in = f" (in `{place.function}`)" if place is not None and place.function != "<module>" else ""
    related = [] if incident.place is None else [incident.place.span("this backward made the gradient non-finite", "backward")]
    module = module_at(place, incident)
    what = elements(fact.bad, fact.total)
    return Diagnosis(
        code="GG502",
        name="nonfinite-backward",
        severity="warning",
        headline=f"The loss is finite and its gradient is not: the backward of `{text}` makes it non-finite in {what}{where_in}.",
        culprit=None if place is None else place.span("its backward got finite gradients and gave non-finite ones", "culprit"),
        related=related,
        tensors=[_fact(incident, leaf) for leaf in bad[:4]],
        explanation=f"Every gradient that reached `{fact.name}` was finite, and what it passed on is not: {_names(incident, bad)} got it.",
        notes=([f"in the module `{module}`"] if module is not None else []) + places.notes + [_untouched(incident, bad, leaves)],
        fixes=list(
            _CURES.get(node_kind(node), [Fix(title="keep its inputs, and the scale of the loss, in the range its derivative allows")])
        ),
        avoid=["`clip_grad_norm_`: it divides by a norm that is NaN and spreads it to every parameter"],
        confidence="certain" if place is not None and not places.notes else "likely",
    )


def finite(tensor: torch.Tensor) -> bool:
    """Whether all elements are finite."""
    try:
        if tensor.layout != torch.strided:
            tensor = tensor.coalesce().values()
        return bool(torch.isfinite(tensor).all())
    except internal_error():
        return True


def _suspects(held: list[Held], bad: set[int]) -> list[tuple[Held, int, int]]:
    """The held nodes whose derivative is not finite somewhere and that lead to a spoilt leaf, in the order backward met them."""
    found = []
    for item in sorted(held, key=lambda item: -node_sequence(item.node)):
        count, total = item.count()
        if count and (
            item.kind in _FORWARD or any(is_accumulate(node) and id(getattr(node, "variable", None)) in bad for node in _below([item.node]))
        ):
            found.append((item, count, total))
    return found


def _below(nodes: Iterable[Any]) -> Iterable[Any]:
    return (node for node, _ in walk(nodes))


_FORWARD = {  # kinds whose value itself was NaN: only the loss did not show it
    "Softmax": "a softmax row in which everything is -inf is 0/0",
    "LogSoftmax": "a log_softmax row in which everything is -inf is NaN",
    "Std": "the unbiased deviation of a single value is 0/0",
}


def _hidden(
    incident: Incident, held: Held, count: int, total: int, places: Places, nodes: list[Any], bad: list[torch.Tensor], notes: list[str]
) -> Diagnosis:
    """A NaN of the forward pass that was masked out of the loss and came back in the gradient."""
    place = places.of(held.node, search=True)
    text = expression(place, held.node)
    says = _FORWARD[held.kind]
    related: list[SourceSpan] = []
    for source, _ in held.node.next_functions:
        made = None if source is None else places.of(source)
        if made is not None and (place is None or made.line != place.line):
            related.append(made.span("its argument is made here", "made"))
    if incident.place is not None:
        related.append(incident.place.span("this backward made the gradient NaN", "backward"))
    fixes = [
        Fix(
            title=(
                "mask with a large finite negative number (`torch.finfo(scores.dtype).min`) in place of -inf, or keep one entry of every"
                " row unmasked"
            )
        ),
        Fix(title="use `F.scaled_dot_product_attention`, which gives zeros for such rows"),
    ]
    masks = [source for source, _ in held.node.next_functions if source is not None and node_kind(source) == "MaskedFill"]
    fixes = finitely_masked(places.of(masks[0]), fixes) if masks else fixes
    return Diagnosis(
        code="GG501",
        name="nonfinite-forward",
        severity="warning",
        headline=f"`{text}` gives NaN in {elements(count, total)}"
        + (f" (in `{place.function}`)" if place is not None else "")
        + ": the loss does not show it, the gradient does.",
        culprit=None if place is None else place.span(says, "culprit"),
        related=related,
        tensors=[_fact(incident, leaf) for leaf in bad[:4]],
        explanation=(
            f"{says[0].upper()}{says[1:]}: NaN. What is masked or left out afterwards keeps the loss finite, but the backward still"
            f" multiplies by the NaN: {_names(incident, bad)} got a gradient that is NaN."
        ),
        notes=notes,
        fixes=fixes if held.kind != "Std" else [Fix(title="pass `correction=0`, or leave groups of one out")],
        avoid=["setting the result to 0 afterwards (`masked_fill`, `nan_to_num`, a mask as factor): the gradient is NaN all the same"],
        confidence="certain" if place is not None and not places.notes else "likely",
    )


def _known(
    incident: Incident,
    numbers: Numbers,
    nodes: list[Any],
    suspects: list[tuple[Held, int, int]],
    bad: list[torch.Tensor],
    leaves: list[torch.Tensor],
) -> Diagnosis:
    held, count, total = suspects[0]
    places = Places(incident, numbers, nodes)
    if held.kind in _FORWARD:
        return _hidden(incident, held, count, total, places, nodes, bad, [_untouched(incident, bad, leaves)])
    place = places.of(held.node, search=True)
    text = expression(place, held.node)
    says = RISKS[held.kind].says
    selecting = _selector(nodes, held.node)
    choice = None if selecting is None else places.of(selecting)
    trap = ""
    if selecting is not None and node_kind(selecting) in ("Where", "WhereSelf"):
        trap = (
            " `torch.where` keeps those elements out of the result but not out of the backward: the branch that is not taken still gets a"
            " gradient of 0, and 0·inf is NaN."
        )
    elif selecting is not None and node_kind(selecting) == "MaskedFill":
        trap = " Masking the result afterwards does not help: the masked elements get a gradient of 0, and 0·inf is NaN."
    related: list[SourceSpan] = []
    if choice is not None and (place is None or choice.line != place.line):
        related.append(choice.span("the elements are left out here, which does not stop their gradient", "context"))
    for other, n, of in suspects[1:3]:
        where = places.of(other.node)
        if where is not None and (place is None or where.line != place.line):
            related.append(where.span(f"the same can happen here: not finite in {elements(n, of)}", "context"))
    if incident.place is not None:
        related.append(incident.place.span("this backward made the gradient non-finite", "backward"))
    where_in = f" (in `{place.function}`)" if place is not None and place.function != "<module>" else ""
    spoilt = _names(incident, bad)
    module = module_at(place, incident)
    fixes = list(_CURES.get(held.kind, [Fix(title="keep the argument away from the point where the derivative is infinite")]))
    fixes = bounded(held.kind, place, fixes)
    if trap and fixes:
        inside = Fix(
            title=(
                f"make the unsafe argument safe *inside* the branch: `safe = torch.where(ok, x, 1.0)`, then {_word(held)} of `safe`,"
                " then the outer selection"
            )
        )
        fixes.insert(0, safe_inside(place, choice, inside))
    return Diagnosis(
        code="GG502",
        name="nonfinite-backward",
        severity="warning",
        headline=(
            f"The loss is finite and its gradient is not: the derivative of `{text}` is not finite in {elements(count, total)}{where_in}."
        ),
        culprit=None if place is None else place.span(says, "culprit"),
        related=related,
        tensors=[_fact(incident, leaf) for leaf in bad[:4]],
        explanation=(
            f"{says[0].upper()}{says[1:]}; it does so in {elements(count, total)} here.{trap} From there on backward the gradient is NaN or"
            f" inf: {spoilt} got one."
        ),
        notes=([f"in the module `{module}`"] if module is not None else []) + places.notes + [_untouched(incident, bad, leaves)],
        fixes=fixes,
        avoid=[
            "`clip_grad_norm_`: it divides by a norm that is NaN and spreads it to every parameter",
            "`nan_to_num` on the result of the op: its input still gets the infinite slope",
        ],
        confidence="certain" if place is not None and not places.notes else "likely",
    )


def _word(held: Held) -> str:
    return {"PowTensor": "the power", "Pow": "the power", "Div": "the quotient"}.get(held.kind, f"`{held.kind.lower()}`")


def _selector(nodes: list[Any], node: Any) -> Any:
    """A node close above in the graph that picks among elements of this one's result."""
    users: dict[Any, list[Any]] = {}
    for item in nodes:
        for source, _ in item.next_functions:
            if source is not None:
                users.setdefault(source, []).append(item)
    near, seen = [node], {node}
    for _ in range(8):
        following = [user for item in near for user in users.get(item, []) if user not in seen]
        for user in following:
            kind = node_kind(user)
            if kind in ("Where", "WhereSelf", "MaskedFill", "Index", "MaskedSelect"):
                return user
        seen.update(following)
        near = following
    return None


def _unknown(incident: Incident, numbers: Numbers, nodes: list[Any], bad: list[torch.Tensor], leaves: list[torch.Tensor]) -> Diagnosis:
    places = Places(incident, numbers, nodes)
    candidates = [
        node
        for node in nodes
        if not is_accumulate(node) and node_kind(node) in RISKS and node_kind(node) not in ("Softmax", "LogSoftmax", "Exp")
    ]
    bad_ids = {id(leaf) for leaf in bad}
    good_ids = {id(leaf) for leaf in leaves if id(leaf) not in bad_ids and leaf.grad is not None}
    fitting = []
    for node in candidates[:64]:
        below = {id(getattr(item, "variable", None)) for item in _below([node]) if is_accumulate(item)}
        if below & bad_ids and not below & good_ids:
            fitting.append(node)
    half = any(leaf.grad is not None and leaf.grad.dtype == torch.float16 for leaf in bad)
    related: list[SourceSpan] = []
    culprit = None
    label = ""
    if len(fitting) == 1:
        place = places.of(fitting[0], search=True)
        if place is not None:
            culprit, label = place, "the only op on the way whose derivative can be infinite"
    else:
        for node in fitting[:3]:
            place = places.of(node)
            if place is not None:
                related.append(place.span("an op whose derivative can be infinite", "context"))
    if incident.place is not None:
        related.append(incident.place.span("this backward made the gradient non-finite", "backward"))
    spoilt = _names(incident, bad)
    why = f"{spoilt} got a gradient that is NaN or infinite, while the loss is a finite number."
    fixes = [Fix(title="run again with `level: strict`, which looks at every op whose derivative can be infinite in every step")]
    if half:
        why += " float16 gradients overflow beyond 65504."
        fixes.insert(0, Fix(title="scale the loss with `torch.amp.GradScaler`, or train in bfloat16"))
    return Diagnosis(
        code="GG502",
        name="nonfinite-backward",
        severity="warning",
        headline=(
            f"The loss is finite and its gradient is not: {spoilt} got NaN or infinite gradients."
            if culprit is None
            else (
                f"The loss is finite and its gradient is not; `{expression(culprit, None)}` is the only op on the way whose derivative can"
                " be infinite."
            )
        ),
        culprit=None if culprit is None else culprit.span(label, "culprit"),
        related=related,
        tensors=[_fact(incident, leaf) for leaf in bad[:4]],
        explanation=why,
        notes=[*places.notes, _untouched(incident, bad, leaves)],
        fixes=fixes,
        confidence="likely",
    )


def _label(incident: Incident, leaf: torch.Tensor) -> str:
    state = incident.names.state(leaf)
    return state.full if state is not None else incident.names.tensor(leaf) or "a leaf tensor"


def _names(incident: Incident, bad: list[torch.Tensor]) -> str:
    return short_list((_label(incident, leaf) for leaf in bad), 4)


def _untouched(incident: Incident, bad: list[torch.Tensor], leaves: list[torch.Tensor]) -> str:
    good = [leaf for leaf in leaves if all(leaf is not other for other in bad)]
    spared = f"; {len(good)} others have finite ones" if good else ""
    return f"{len(bad)} of {len(leaves)} parameters have a non-finite gradient{spared}"


def _fact(incident: Incident, leaf: torch.Tensor) -> TensorFacts:
    return TensorFacts(
        name=_label(incident, leaf),
        kind="parameter",
        shape=list(leaf.shape),
        dtype=str(leaf.dtype).removeprefix("torch."),
        requires_grad=True,
    )
