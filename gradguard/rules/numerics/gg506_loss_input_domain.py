"""# GG506 loss-input-domain

## What it is
A loss function is given numbers of another kind than it expects: probabilities where it takes raw scores and applies the softmax or
sigmoid itself (`cross_entropy`, `binary_cross_entropy_with_logits`), probabilities or raw scores where it takes log-probabilities
(`nll_loss`, `kl_div`), log-probabilities as a target that is to be probabilities, or the other way round (`kl_div`'s `log_target`), rates
where it takes their logarithms (`poisson_nll_loss`), targets far outside [0, 1].

## Why it is wrong
Nothing raises, and the loss falls. A softmax of a softmax can give no class more than e times the weight of another, so gradients are
small and the loss never gets near 0. `nll_loss` and `kl_div` of anything but log-probabilities are no likelihood and no divergence: the
loss goes below 0, and its minimum is not where the two distributions agree.

## Example
    student = F.softmax(logits, dim=1)
    loss = F.kl_div(student, teacher, reduction="batchmean")

## Use instead
    student = F.log_softmax(logits, dim=1)
    loss = F.kl_div(student, teacher, reduction="batchmean")

## Fix safety
Unsafe: the loss becomes another one, which is the purpose.

## When it speaks, what silences it
In traced steps, for calls whose result goes into the loss. Values decide: numbers in [0, 1] that were made by a softmax or sigmoid, or that
add up to 1 along the class dimension and were normalised; a layer's output above 0 in place of log-probabilities, unless something else
of the graph uses it too (`logits.logsumexp(1) + F.nll_loss(logits, y)` is right). Probabilities that are scaled before `cross_entropy`,
`log_softmax` before `cross_entropy`, unnormalised log-densities, losses that are only logged and losses written by hand are silent.
`# gradguard: ignore[GG506]` on the call's line silences it.

What PyTorch refuses is explained at every level: numbers outside [0, 1] for `binary_cross_entropy`, and a target with a column of class
numbers or a one-hot table for `cross_entropy` and `nll_loss`.
"""

from __future__ import annotations

import ast
import math
from typing import Any

import torch

from gradguard.analysis.graph.walk import nodes_from
from gradguard.analysis.incident import Incident
from gradguard.analysis.places.source import ResolvedSite
from gradguard.core.diagnosis import Diagnosis, Fix, SourceSpan, TensorFacts
from gradguard.core.moments import Moment
from gradguard.core.notes import Notes
from gradguard.fixes.edits import replaced, with_argument
from gradguard.instrumentation.facts import DomainFact
from gradguard.instrumentation.journal import current_journal
from gradguard.monitors.numerics import Numbers
from gradguard.rules.base import Rule
from gradguard.torch_compat.private_api import node_sequence

CODE, NAME = "GG506", "loss-input-domain"
_WHY = {
    "cross_entropy": "`cross_entropy` applies log_softmax itself. On top of probabilities, no class can get more than e times the weight of"
    " another: the loss stays high however good the model is, and its gradients are small.",
    "log_softmax": "A softmax of probabilities can give no class more than e times the weight of another: a loss of it stays high however"
    " good the model is, and its gradients are small.",
    "binary_cross_entropy_with_logits": "It applies the sigmoid itself. On top of a value in [0, 1], the probability stays between 0.5 and"
    " 0.73: nothing can be predicted as negative.",
    "nll_loss": "`nll_loss` takes the logarithm of nothing: it returns minus the number at the target's class. Only of log-probabilities is"
    " this a likelihood",
    "kl_div": "`kl_div` computes target * (log target - input). Only with log-probabilities as input is this a divergence",
    "poisson_nll_loss": "With `log_input=True`, the default, it takes the exponential of its input; with `log_input=False`, the logarithm",
}


def screen(notes: Notes, moment: Moment, facts: dict[str, Any], traced: bool) -> bool:
    """Whether such a call was seen in this step at all."""
    domains = current_journal().domains
    return bool(domains) and domains[-1].step == current_journal().step


def recognise(incident: Incident) -> Diagnosis | None:
    """The first call of this step whose result is part of the loss; or the call that PyTorch refuses."""
    if incident.error is not None:
        return _refused(incident)
    journal = incident.journal
    facts = [fact for fact in journal.domains if fact.step == journal.step]
    nodes = nodes_from(incident.root_nodes)
    present = {node_sequence(node) for node in nodes}
    for fact in facts:
        made = set(range(fact.seq_from, fact.seq_to))
        if made.isdisjoint(present):
            continue
        if fact.found == "logits" and _used_elsewhere(nodes, fact, made):
            continue
        found = _told(incident, fact, sole=not _used_elsewhere(nodes, fact, made))
        numbers = incident.notes[Numbers]
        if numbers.loss_bad:  # the logarithm of a target below 0: this is why
            numbers.told = found
        return found
    return None


def _used_elsewhere(nodes: list[Any], fact: DomainFact, made: set[int]) -> bool:
    """Whether the graph has a user of the value, or of what it was made of, beside the call."""
    way = set(fact.way)
    return any(
        source is not None and node_sequence(source) in way
        for node in nodes
        if (number := node_sequence(node)) not in made and number not in way
        for source, _ in node.next_functions
    )


def _told(incident: Incident, fact: DomainFact, sole: bool) -> Diagnosis:
    place = incident.place_of_node(fact.seq_from)
    source = None if fact.maker is None else incident.place_of_node(fact.maker)
    function = fact.name
    which = "first argument" if fact.argument == "input" else "target"
    found = {"logits": "raw scores"}.get(fact.found, fact.found)
    expected = {"logits": "raw scores", "log-rates": "logarithms of rates"}.get(fact.expected, fact.expected)
    headline = f"`{function}` expects {expected} as its {which}, and gets {found}"
    related: list[SourceSpan] = []
    if source is not None and (place is None or (source.line, source.file) != (place.line, place.file)):
        related.append(source.span(f"the {found} are made here", "context"))
    if incident.place is not None and (place is None or incident.place.line != place.line):
        related.append(incident.place.span("backward is called on the loss here", "backward"))
    return Diagnosis(
        code=CODE,
        name=NAME,
        severity="warning",
        headline=headline,
        culprit=None if place is None else place.span(f"its {which} is {found}, not {expected}", "culprit"),
        related=related,
        explanation=_explained(fact),
        fixes=_fixes(fact, place, source, sole),
        confidence="certain" if function == "kl_div" and fact.found != "logits" else "likely",
    )


def _explained(fact: DomainFact) -> str:
    if fact.argument == "input":
        why = _WHY[fact.name]
        return why if why.endswith(".") else f"{why}; of {'raw scores' if fact.found == 'logits' else fact.found} it has no meaning."
    if fact.name == "kl_div":
        log = "the exponential" if fact.expected == "log-probabilities" else "the logarithm"
        return f"With `log_target={fact.expected == 'log-probabilities'}`, `kl_div` takes {log} of its target itself."
    if fact.name == "cross_entropy":
        return "A floating-point target is the probability of each class, and the loss its product with the log-probabilities."
    return "The loss has a minimum only for targets between 0 and 1; for others it falls without a bound as the score grows."


def _fixes(fact: DomainFact, place: ResolvedSite | None, source: ResolvedSite | None, sole: bool) -> list[Fix]:
    if fact.argument == "target":
        return _target_fixes(fact, place)
    if fact.expected == "logits":
        binary = fact.name == "binary_cross_entropy_with_logits"
        word = "sigmoid" if binary else "softmax"
        patch = None
        if fact.plain and sole and source is not None and source.source is not None and (inner := _of_squashing(source)) is not None:
            patch = replaced(source.source, [(source.node, source.source.flat(inner))])  # type: ignore[list-item]
        fixes = [Fix(title=f"Give the loss the raw scores: leave out the {word} before it", safety="unsafe", patch=patch)]
        if binary:
            fixes.append(Fix(title="Keep it and use `F.binary_cross_entropy`, which expects probabilities"))
        else:
            fixes.append(Fix(title="Keep it and use `F.nll_loss(torch.log(probs.clamp_min(1e-8)), target)`"))
        return fixes
    if fact.expected == "log-probabilities":
        if fact.found == "logits" or place is None:
            return [Fix(title=f"Put `F.log_softmax(scores, dim=...)` before `{fact.name}`", safety="unsafe", patch=_wrapped(place))]
        patch = None
        if fact.plain and sole and source is not None and source.source is not None:
            patch = _log_softmax(source)
        return [
            Fix(title="Make the input with `F.log_softmax` in place of `F.softmax`", safety="unsafe", patch=patch),
            Fix(title="Take the logarithm at the call: `probs.clamp_min(1e-8).log()`"),
        ]
    log = fact.expected == "log-rates"
    return [Fix(title=f"Pass `log_input={not log}`" if log else "Put `softplus` or `exp` before the loss, or pass `log_input=True`")]


def _target_fixes(fact: DomainFact, place: ResolvedSite | None) -> list[Fix]:
    if fact.name == "kl_div" and fact.found in ("log-probabilities", "probabilities"):
        wanted = fact.found == "log-probabilities"
        patch = None
        call, source = (None, None) if place is None or not _is_function(place, "kl_div") else (place.call, place.source)
        if wanted and call is not None and source is not None and len(call.args) <= 5:
            given = {keyword.arg for keyword in call.keywords}
            patch = None if given & {"log_target", None} else with_argument(source, call, "log_target=True")
        return [Fix(title=f"Pass `log_target={wanted}`", safety="unsafe", patch=patch)]
    if fact.name == "kl_div":
        return [Fix(title="Give it the target's probabilities: `F.softmax(target, dim=...)`", safety="unsafe")]
    if fact.name == "cross_entropy":
        return [Fix(title="Give it the target's probabilities: `target.exp()`", safety="unsafe")]
    return [Fix(title="Bring the target to [0, 1]: `(target > 0).float()` of labels -1 and 1, `/ 255` of an image", safety="unsafe")]


def _is_function(place: ResolvedSite, name: str) -> bool:
    return place.call is not None and (place.callee_full_name or "").startswith("torch.") and (place.callee or "").endswith(name)


def _of_squashing(place: ResolvedSite) -> ast.expr | None:
    """What stands within a call of softmax or sigmoid as written; None where the line is another's call (`self.model(x)`)."""
    call = place.call
    if call is None or (place.callee or "").rpartition(".")[2] not in ("softmax", "sigmoid"):
        return None
    first = call.args[0] if call.args else None
    if isinstance(call.func, ast.Attribute) and (first is None or isinstance(first, (ast.Constant, ast.UnaryOp))):
        return call.func.value if not (place.callee_full_name or "").startswith("torch.") else None
    return first if not isinstance(first, ast.Starred) else None


def _log_softmax(place: ResolvedSite) -> str | None:
    """A patch that makes `softmax` as written `log_softmax`."""
    call = place.call
    if call is None or place.source is None or _of_squashing(place) is None or not (place.callee or "").endswith("softmax"):
        return None
    if not isinstance(call.func, ast.Attribute):
        return None
    full = (place.callee_full_name or "").startswith("torch.")
    if not full and call.args and not isinstance(call.args[0], (ast.Constant, ast.UnaryOp)):
        return None  # a module's
    return replaced(place.source, [(call.func, f"{place.source.flat(call.func.value)}.log_softmax")])


def _wrapped(place: ResolvedSite | None) -> str | None:
    if place is None or place.call is None or place.source is None or not place.call.args:
        return None
    if not _is_function(place, "nll_loss"):
        return None
    first = place.call.args[0]
    prefix = (place.callee or "").rpartition(".")[0]
    name = f"{prefix}.log_softmax" if prefix else None
    return None if name is None else replaced(place.source, [(first, f"{name}({place.source.flat(first)}, dim=1)")])


_REFUSED = (
    "all elements of input should be between 0 and 1",
    "all elements of target should be between 0 and 1",
    "0d or 1d target tensor expected",
    "multi-target not supported",
)
_NAMES = ("binary_cross_entropy", "nll_loss", "cross_entropy")


def _refused(incident: Incident) -> Diagnosis | None:
    """PyTorch refuses the numbers, or the shape, of what a loss was given."""
    given = _given(incident)
    if given is None:
        return None
    name, scores, target = given
    place = incident.place
    if not incident.says("should be between 0 and 1"):
        return _class_numbers(name, scores, target, place)
    which, tensor = ("first argument", scores) if incident.says("elements of input") else ("target", target)
    low, high = (float(value) for value in tensor.detach().float().aminmax())
    if not math.isfinite(low) or not math.isfinite(high):
        return None
    found = f"numbers from {low:.3g} to {high:.3g}"
    if which == "target":
        fixes = [Fix(title="Bring the target to [0, 1]: `(target > 0).float()` of labels -1 and 1, `/ 255` of an image", safety="unsafe")]
    else:
        patch = None
        if place is not None and place.call is not None and place.source is not None and _is_function(place, "binary_cross_entropy"):
            patch = replaced(place.source, [(place.call.func, f"{place.source.flat(place.call.func)}_with_logits")])
        instead = "F.binary_cross_entropy_with_logits" if patch else "nn.BCEWithLogitsLoss()"
        fixes = [
            Fix(title=f"Give raw scores to `{instead}`, which applies the sigmoid itself", safety="unsafe", patch=patch),
            Fix(title="Put a sigmoid before the loss", safety="unsafe"),
        ]
    return Diagnosis(
        code=CODE,
        name=NAME,
        headline=f"`{name}` expects probabilities as its {which}, and gets {found}",
        culprit=None if place is None else place.span(f"its {which} has {found}", "culprit"),
        tensors=[TensorFacts(shape=list(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))],
        explanation="It takes the logarithm of the first argument and of one minus it: both have to lie between 0 and 1."
        if which == "first argument"
        else "The loss has a minimum only for targets between 0 and 1.",
        fixes=fixes,
    )


def _class_numbers(name: str, scores: torch.Tensor, target: torch.Tensor, place: ResolvedSite | None) -> Diagnosis | None:
    """Of one class number a sample there is one dimension less than of scores."""
    column = target.dim() == scores.dim() == 2 and target.shape[1] == 1
    table = target.dim() == scores.dim() == 2 and target.shape == scores.shape
    if not column and not table:
        return None
    shape, what = list(target.shape), "a column" if column else "a table with a column for each class"
    wanted = "squeeze(1)" if column else "argmax(dim=1)"
    patch = None
    if place is not None and place.call is not None and place.source is not None and len(place.call.args) > 1:
        patch = replaced(place.source, [(place.call.args[1], _method(place.source.flat(place.call.args[1]), place.call.args[1], wanted))])
    return Diagnosis(
        code=CODE,
        name=NAME,
        headline=f"`{name}` expects one class number a sample as its target, of shape [{shape[0]}], and gets {what} of shape {shape}",
        culprit=None if place is None else place.span(f"its target has shape {shape}", "culprit"),
        tensors=[TensorFacts(shape=shape, dtype=str(target.dtype).removeprefix("torch."))],
        explanation="An integer target holds the number of the right class for each sample, not a row of marks."
        if table
        else "An integer target holds one number a sample, without a dimension of its own for it.",
        fixes=[Fix(title=f"Pass the class numbers: `target.{wanted}`", safety="safe" if column else "unsafe", patch=patch)],
    )


def _method(text: str, node: ast.expr, call: str) -> str:
    return f"{text}.{call}" if isinstance(node, (ast.Name, ast.Attribute, ast.Call, ast.Subscript)) else f"({text}).{call}"


def _given(incident: Incident) -> tuple[str, torch.Tensor, torch.Tensor] | None:
    """The loss's name, and its two tensors: as the failing call got them, or as the loss's own frame has them."""
    name = getattr(incident.func, "__name__", "")
    if name in _NAMES:
        both = [*incident.args, *(incident.kwargs.get(key) for key in ("input", "target")[len(incident.args) :])][:2]
        if len(both) == 2 and all(issubclass(type(each), torch.Tensor) for each in both):
            return name, both[0], both[1]
    for view in incident.all_frames:
        if view.code_name in _NAMES and view.frame.f_code.co_filename.endswith("functional.py"):
            scores, target = view.locals.get("input"), view.locals.get("target")
            if isinstance(scores, torch.Tensor) and isinstance(target, torch.Tensor):
                return view.code_name, scores, target
    return None


RULE = Rule(
    code=CODE,
    name=NAME,
    summary="a loss function is given probabilities, log-probabilities or raw scores where it expects another of these",
    recognise=recognise,
    moments=frozenset({"error", "before_backward"}),
    priority=20,
    messages=_REFUSED,
    severity="warning",
    traced_only=True,
    screen=screen,
)
