"""A loop over a list of modules that calls the same one each time: `[self.heads[0](x) for head in self.heads]`."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import nn

from gradguard.analysis.live.names import Names
from gradguard.analysis.places.source import ResolvedSite, dotted, resolve
from gradguard.core.safe_read import peek

if TYPE_CHECKING:
    from gradguard.monitors.gradient_ledger import Ledger


@dataclass(frozen=True)
class FixedIndex:
    """The call, and whose place it takes.

    Attributes:
        place: the line that calls it.
        items: the list as written in its class, such as `self.heads`.
        index: the item that is called each time.
        times: how often a forward call does so.
        instead: what the loop has for each item, such as `head` or `self.heads[i]`; None where that is not known.
    """

    place: ResolvedSite
    items: str
    index: int
    times: int
    instead: str | None


def fixed_index(names: Names, parameters: list[torch.Tensor], ledger: Ledger) -> FixedIndex | None:
    """The one item that is called in place of all others, as often as there are items, by one line: as the census has counted.

    Args:
        parameters: those that never get a gradient, of all other items of one list.
    """
    lists = {found for parameter in parameters if (found := _list_of(names, parameter)) is not None}
    if len(lists) != 1 or not parameters:
        return None
    owner, attribute = next(iter(lists))
    items = owner._modules.get(attribute)
    if not isinstance(items, nn.ModuleList):
        return None
    idle = {id(parameter) for parameter in parameters}
    used = [i for i, item in enumerate(items) if not any(id(p) in idle for p in item.parameters())]
    forwards = ledger.calls_of(owner)
    if len(used) != 1 or len(items) < 2 or not forwards:
        return None
    calls = ledger.calls_of(items[used[0]])
    site = ledger.only_site(items[used[0]])
    place = resolve(site)
    if calls != len(items) * forwards or place is None:
        return None
    shown = f"self.{attribute}"
    return FixedIndex(place, shown, used[0], len(items), _instead(place, shown))


def _list_of(names: Names, parameter: torch.Tensor) -> tuple[nn.Module, str] | None:
    state = names.state(parameter)
    if state is None:
        return None
    owner, steps = state.root, state.path.split(".")
    for step, following in pairwise(steps):
        if following.isdigit():
            return owner, step
        owner = peek(owner, step, owner)
    return None


def _instead(place: ResolvedSite, items: str) -> str | None:
    """What the innermost loop around a place has for the item it is at."""
    for above in () if place.source is None or place.node is None else place.source.ancestors(place.node):
        if isinstance(above, (ast.ListComp, ast.GeneratorExp, ast.DictComp, ast.SetComp)):
            return _item(above.generators[-1].target, above.generators[-1].iter, items)
        if isinstance(above, ast.For):
            return _item(above.target, above.iter, items)
    return None


def _item(target: ast.expr, over: ast.expr, items: str) -> str | None:
    called = dotted(over.func) if isinstance(over, ast.Call) else None
    if dotted(over) == items and isinstance(target, ast.Name) and target.id != "_":
        return target.id
    if called == "enumerate" and isinstance(target, ast.Tuple) and len(target.elts) == 2 and isinstance(target.elts[1], ast.Name):
        return target.elts[1].id if target.elts[1].id != "_" else None
    return f"{items}[{target.id}]" if called == "range" and isinstance(target, ast.Name) and target.id != "_" else None
