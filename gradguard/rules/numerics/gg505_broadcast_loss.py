"""# GG505 broadcast-loss

## What it is
A prediction of shape [n, 1] meets a target of shape [n] (or the other way round) in a loss: broadcasting makes an
[n, n] table of each prediction against each target, and the mean over it is taken for the loss: by `F.mse_loss` and its like, by a
difference, or by the `log_prob` of a distribution. Or losses of shape [n, 1] are multiplied by weights of shape [n].

## Why it is wrong
Nothing raises, and the number looks like a loss. Every prediction is trained towards
all targets alike: with squared errors, towards their mean.

## Example
    values = self.critic(states)               # [64, 1]
    loss = (returns - values).pow(2).mean()    # returns are [64]: the difference is [64, 64]

## Use instead
    values = self.critic(states).squeeze(-1)
    loss = (returns - values).pow(2).mean()

## Fix safety
Unsafe: the loss becomes another one, which is the purpose.

## When it speaks, what silences it
In traced steps, where the result goes into the loss through nothing but elementwise functions and a mean or sum: the result of a loss
function (`mse_loss`, `l1_loss`, `smooth_l1_loss`, `huber_loss` ...) of two tensors with as many elements and another shape; a difference of
an [n, 1] and an [n] tensor, one of them with a gradient and the other without; a product of two such tensors of which nothing but the sum
is left. Pairwise tables that are made on purpose are silent: by a column that was made of a row (`x[:, None] - y`) or by a reduction that
keeps its dimension, or of two sides that the model computed.
"""

from __future__ import annotations

import ast
from typing import Any

from gradguard.analysis.graph.recompute import node_kind
from gradguard.analysis.incident import Incident
from gradguard.analysis.places.source import ResolvedSite
from gradguard.core.diagnosis import Diagnosis, Fix, TensorFacts
from gradguard.core.moments import Moment
from gradguard.core.notes import Notes
from gradguard.fixes.edits import replaced
from gradguard.instrumentation.facts import Spread
from gradguard.instrumentation.journal import current_journal
from gradguard.rules.base import Rule
from gradguard.torch_compat.private_api import node_sequence

CODE, NAME = "GG505", "broadcast-loss"
# what may stand between the table and the loss
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
        "Stack",
        "Rsub",
        "MseLoss",
        "SmoothL1Loss",
        "HuberLoss",
        "Where",
        "Clamp",
        "Maximum",
        "Max",
    }
)
_LINEAR = frozenset({"Mean", "Sum", "Mul", "Div", "Add", "Sub", "Rsub", "Neg", "Stack"})
_MOST_NODES = 256


def screen(notes: Notes, moment: Moment, facts: dict[str, Any], traced: bool) -> bool:
    """Whether such a table was made since the last backward call at all."""
    spread = current_journal().spread
    return bool(spread) and spread[-1].step == current_journal().step


def recognise(incident: Incident) -> Diagnosis | None:
    """The table, and what has which shape."""
    journal = incident.journal
    made = {fact.seq: fact for fact in journal.spread if fact.step == journal.step}
    near = _near(incident.root_nodes)
    for node, linear in near:
        fact = made.get(node_sequence(node))
        if fact is None or (fact.made == "product" and not linear):
            continue  # a table of products may be meant; of one that is only summed up, nothing but the two sums is left
        squared = node_kind(node) == "MseLoss" or _squared(
            [user for user, _ in near if any(each is node for each, _ in user.next_functions)]
        )
        return _told(incident, fact, incident.place_of_node(fact.seq), squared)
    return None


def _near(roots: list[Any]) -> list[tuple[Any, bool]]:
    """The nodes that a loss leads to through elementwise functions and means only, each with whether these were linear."""
    order: list[tuple[Any, bool]] = [(root, True) for root in roots]
    seen = set(roots)
    for node, linear in order:  # grows while it is read
        kind = node_kind(node)
        if kind in _PLAIN and len(order) < _MOST_NODES:
            sources = [source for source, _ in node.next_functions if source is not None]
            linear = linear and kind in _LINEAR and (kind not in ("Mul", "Div") or len(sources) == 1)
            for source in sources:
                if source not in seen:
                    seen.add(source)
                    order.append((source, linear))
    return order


def _squared(users: list[Any]) -> bool:
    """Whether a difference is used as its square alone."""
    return bool(users) and all(
        node_kind(user) == "MseLoss"
        or (node_kind(user) == "Pow" and getattr(user, "_saved_exponent", None) == 2)
        or (node_kind(user) == "Mul" and len({id(source) for source, _ in user.next_functions}) == 1)
        for user in users
    )


def _operands(place: ResolvedSite | None, fact: Spread) -> tuple[ast.expr, ast.expr] | None:
    """Both sides as written: of `Normal(mean, std).log_prob(target)`, what is asked about and the distribution."""
    node = None if place is None else place.node
    if isinstance(node, ast.BinOp):
        return (node.left, node.right) if isinstance(node.op, ast.Mult if fact.made == "product" else ast.Sub) else None
    if place is None or not isinstance(node, ast.Call) or not fact.direct or any(isinstance(item, ast.Starred) for item in node.args):
        return None
    given = [*node.args, *(keyword.value for name in ("input", "target") for keyword in node.keywords if keyword.arg == name)]
    if fact.made not in ("difference", "product"):
        return (given[0], given[1]) if len(given) >= 2 else None
    if not isinstance(node.func, ast.Attribute):
        return None
    if node.func.attr == "log_prob" and len(node.args) == 1:
        return node.args[0], node.func.value
    if node.func.attr in ("sub", "subtract", "mul", "multiply"):
        if len(given) == 2:
            return given[0], given[1]
        return (node.func.value, given[0]) if len(given) == 1 else None
    return None


def _told(incident: Incident, fact: Spread, place: ResolvedSite | None, squared: bool) -> Diagnosis:
    operands = _operands(place, fact)
    source = None if place is None else place.source
    shapes = [str(list(fact.shapes[i])) for i in (fact.column, 1 - fact.column)]
    patch = None
    loss = fact.made not in ("difference", "product")
    column = row = ""
    likelihood = False
    if operands is None or source is None:
        who = ("input", "target") if loss else ("left side", "right side")
        column_is, row_is = (f"the {who[i]} is" for i in (fact.column, 1 - fact.column))
        title = "give both one shape: `.squeeze(-1)` on the column"
    else:
        column, row = (source.flat(operands[i]) for i in (fact.column, 1 - fact.column))
        likelihood = not loss and isinstance(place.node, ast.Call) and source.flat(place.node.func).endswith("log_prob")  # type: ignore[union-attr]
        column_is, row_is = f"`{column}` is", f"`{row}` is"
        title = f"give both one shape: `{column}.squeeze(-1)`, or `{row}.unsqueeze(-1)`"
        if likelihood and fact.column:
            column_is, title = f"the mean of `{column}` is", f"give both one shape: `log_prob({row}.unsqueeze(-1))`"
            patch = replaced(source, [(operands[0], f"{row}.unsqueeze(-1)")])
        elif likelihood:
            row_is, title = f"the mean of `{row}` is", f"give both one shape: `log_prob({column}.squeeze(-1))`"
            patch = replaced(source, [(operands[0], f"{column}.squeeze(-1)")])
        elif isinstance(operands[fact.column], (ast.Name, ast.Attribute, ast.Call, ast.Subscript)):
            flat = "squeeze(-1)" if len(fact.shapes[fact.column]) == 2 else "flatten()"
            patch = replaced(source, [(operands[fact.column], f"{column}.{flat}")])
    made = f"`{fact.made}` of them" if loss else f"their {fact.made}"
    backward = [] if incident.place is None else [incident.place.span("the loss is a mean over all pairs", "backward")]
    aim = "the mean of all targets" if squared else "all targets alike"
    why = f"A loss over it trains every prediction towards {aim}, not towards its own."
    if fact.made == "product":
        sides = f"`{column}` times the sum of `{row}`" if column else "one times the sum of the other"
        why = f"Its sum is the sum of {sides}: no element is weighted by its own factor."
    return Diagnosis(
        code=CODE,
        name=NAME,
        severity="warning",
        headline=f"{column_is} {shapes[0]} and {row_is} {shapes[1]}: {made} is a table of all pairs, [{fact.size}, {fact.size}]",
        culprit=None
        if place is None
        else place.span(f"broadcasts to [{fact.size}, {fact.size}]: each of one against each of the other", "culprit"),
        related=backward,
        tensors=[]
        if likelihood or not column
        else [TensorFacts(name=name, shape=list(fact.shapes[i])) for name, i in ((column, fact.column), (row, 1 - fact.column))],
        explanation=f"Broadcasting stretches a column and a row to a table. {why}",
        fixes=[Fix(title=title, safety="unsafe", patch=patch)],
        confidence="certain" if loss else "likely",
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
