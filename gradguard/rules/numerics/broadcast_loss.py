"""# GG505 broadcast-loss

## What it is
A prediction of shape [n, 1] meets a target of shape [n] (or the other way round) in a loss written by hand: broadcasting makes an
[n, n] table of each prediction against each target, and the mean over it is taken for the loss: by a difference, or by the
`log_prob` of a distribution. Or losses of shape [n, 1] are multiplied by weights of shape [n].

## Why it is wrong
Nothing raises, and the number looks like a loss. What it trains every prediction towards is the mean of all targets.

## Example
    values = self.critic(states)               # [64, 1]
    loss = (returns - values).pow(2).mean()    # returns are [64]: the difference is [64, 64]

## Use instead
    values = self.critic(states).squeeze(-1)
    loss = (returns - values).pow(2).mean()

## Fix safety
Unsafe: the loss becomes another one, which is the purpose.

## When it speaks, what silences it
In traced steps, where a difference of an [n, 1] and an [n] tensor, one of them with a gradient and the other without, goes into the
loss through nothing but elementwise functions and a mean or sum, and the column is what a layer gives or a plain variable; or where
the product of two such tensors is summed or averaged as a whole at once. Pairwise
tables that are made on purpose (`x[:, None] - y`, `keepdim=True`, both sides computed by the model) are silent.
"""

from __future__ import annotations

import ast
from typing import Any

from gradguard.diagnosis import Diagnosis, Fix, TensorFacts
from gradguard.evidence.bindings import assignments_to
from gradguard.evidence.recompute import node_kind
from gradguard.evidence.source import ResolvedSite
from gradguard.facts import Spread
from gradguard.fixes.edits import replaced
from gradguard.journal import current_journal
from gradguard.rules.base import Moment, Rule
from gradguard.rules.incident import Incident
from gradguard.torch_internals import node_sequence

CODE, NAME = "GG505", "broadcast-loss"
# what may stand between the difference and the loss
_PLAIN = frozenset(
    {
        "Mean",
        "Sum",
        "Pow",
        "Abs",
        "Mul",
        "Div",
        "Add",
        "Sub",
        "Neg",
        "Sqrt",
        "SmoothL1Loss",
        "HuberLoss",
        "Where",
        "Clamp",
        "Maximum",
        "Max",
    }
)
_WHOLE = ("MeanBackward0", "SumBackward0")  # over all elements
_ON_PURPOSE = ("unsqueeze", "keepdim", "None", "newaxis", "view", "reshape", "expand", "cdist")
_MOST_NODES = 256


def screen(memory: dict[str, Any], moment: Moment, facts: dict[str, Any], traced: bool) -> bool:
    """Whether such a difference was made since the last backward call at all."""
    spread = current_journal().spread
    return bool(spread) and spread[-1].step == current_journal().step


def recognise(incident: Incident) -> Diagnosis | None:
    """The difference, and what has which shape."""
    journal = incident.journal
    made = {fact.seq: fact for fact in journal.spread if fact.step == journal.step}
    for node, parent in _near(incident.root_nodes):
        fact = made.get(node_sequence(node))
        if fact is not None and fact.product and (parent is None or parent.name() not in _WHOLE):
            continue  # a table of products may be meant; of one that is summed up at once, only the two sums are left
        place = None if fact is None else incident.place_of_node(fact.seq)
        if fact is not None and place is not None and (operands := _operands(place)) is not None and not _on_purpose(place, operands, fact):
            return _told(incident, fact, place, operands)
    return None


def _near(roots: list[Any]) -> list[tuple[Any, Any]]:
    """The nodes that a loss leads to through elementwise functions and means only, each with the node that it was reached from."""
    order: list[tuple[Any, Any]] = [(root, None) for root in roots]
    seen = set(roots)
    for node, _ in order:  # grows while it is read
        if node_kind(node) in _PLAIN and len(order) < _MOST_NODES:
            for source, _ in node.next_functions:
                if source is not None and source not in seen:
                    seen.add(source)
                    order.append((source, node))
    return order


def _operands(place: ResolvedSite) -> tuple[ast.expr, ast.expr] | None:
    """Both sides of the difference as written: of `Normal(mean, std).log_prob(target)`, what is asked about and the distribution."""
    node = place.node
    if isinstance(node, ast.BinOp):
        return node.left, node.right
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "log_prob" and len(node.args) == 1:
        return node.args[0], node.func.value
    return None


def _on_purpose(place: ResolvedSite, operands: tuple[ast.expr, ast.expr], fact: Spread) -> bool:
    """Whether the source makes the column a column."""
    column = operands[fact.column]
    if place.source is None:
        return True
    texts = [place.source.flat(column)]
    scope = place.enclosing_function or place.source.tree
    if isinstance(column, ast.Name) and scope is not None:
        texts += [place.source.flat(item.value) for item in assignments_to(scope, column.id) if getattr(item, "value", None) is not None]  # type: ignore[attr-defined]
    return any(word in text for text in texts for word in _ON_PURPOSE)


def _told(incident: Incident, fact: Spread, place: ResolvedSite, operands: tuple[ast.expr, ast.expr]) -> Diagnosis:
    assert place.source is not None
    column, row = (place.source.flat(operands[i]) for i in (fact.column, 1 - fact.column))
    patch = None
    likelihood = isinstance(place.node, ast.Call)
    column_is, row_is = f"`{column}` is", f"`{row}` is"
    title = f"give both one shape: `{column}.squeeze(-1)`, or `{row}.unsqueeze(-1)`"
    if likelihood and fact.column:
        column_is, title = f"the mean of `{column}` is", f"give both one shape: `log_prob({row}.unsqueeze(-1))`"
        patch = replaced(place.source, [(operands[0], f"{row}.unsqueeze(-1)")])
    elif likelihood:
        row_is, title = f"the mean of `{row}` is", f"give both one shape: `log_prob({column}.squeeze(-1))`"
        patch = replaced(place.source, [(operands[0], f"{column}.squeeze(-1)")])
    elif isinstance(operands[fact.column], (ast.Name, ast.Attribute, ast.Call, ast.Subscript)):
        patch = replaced(place.source, [(operands[fact.column], f"{column}.squeeze(-1)")])
    made = "product" if fact.product else "difference"
    backward = [] if incident.place is None else [incident.place.span("the loss is a mean over all pairs", "backward")]
    why = "A loss over it trains every prediction towards the mean of all targets, not towards its own."
    if fact.product:
        why = f"Its sum is the sum of `{column}` times the sum of `{row}`: no element is weighted by its own factor."
    return Diagnosis(
        code=CODE,
        name=NAME,
        severity="warning",
        headline=f"{column_is} [{fact.size}, 1] and {row_is} [{fact.size}]: their {made} is a table of all pairs, "
        f"[{fact.size}, {fact.size}]",
        culprit=place.span(f"broadcasts to [{fact.size}, {fact.size}]: each of one against each of the other", "culprit"),
        related=backward,
        tensors=[] if likelihood else [TensorFacts(name=column, shape=[fact.size, 1]), TensorFacts(name=row, shape=[fact.size])],
        explanation=f"Broadcasting stretches a column and a row to a table. {why}",
        fixes=[Fix(title=title, safety="unsafe", patch=patch)],
        confidence="likely",
    )


RULE = Rule(
    code=CODE,
    name=NAME,
    summary="a loss over all pairs of predictions and targets, by broadcasting [n, 1] against [n]",
    recognise=recognise,
    moments=frozenset({"before_backward"}),
    severity="warning",
    traced_only=True,
    screen=screen,
)
