"""Patches for `unscale_`: moved, with the clipping, to the step that it belongs to; put before a clipping that has none. Part of GG721."""

from __future__ import annotations

import ast
from itertools import takewhile
from typing import NamedTuple

from gradguard.analysis.places.sites import site_at
from gradguard.analysis.places.source import ResolvedSite
from gradguard.analysis.program.blocks import loops_around
from gradguard.analysis.program.expressions import calls_inside, inside
from gradguard.fixes.at_places import bare_call, brought_before, own_statement, put_before
from gradguard.fixes.statements import moved_before, siblings
from gradguard.rules.frameworks.gg721_amp_unscale import skipped_update

_CLIPS = ("clip_grad_norm_", "clip_grad_value_", "clip_grad_norm", "clip_grads_with_norm_")


class Move(NamedTuple):
    """The way to the step.

    Attributes:
        clipping: whether a clipping comes right after `unscale_`, and has to go with it.
        test: the condition that the step stands under, and `unscale_` does not.
        patch: the diff, where what is moved and what is between have nothing to do with each other.
    """

    clipping: bool
    test: ast.expr | None
    patch: str | None


def to_the_step(place: ResolvedSite, receiver: str) -> Move | None:
    """How `unscale_`, which runs for every micro-batch, is brought to the one step of the function; None where there is no such step."""
    source, own = place.source, bare_call(place)
    around = None if source is None else place.enclosing_function or source.tree
    if source is None or own is None or around is None:
        return None
    block = siblings(source, own[1])
    steps = [site_at(source, call) for call in calls_inside(around, "step") if _receiver(call) == receiver]
    step = own_statement(steps[0]) if len(steps) == 1 else None
    if step is None:
        return None
    first, way = block.index(own[1]), list(takewhile(lambda each: each not in block, (step[1], *source.ancestors(step[1]))))
    top = step[1] if not way else source.parents.get(way[-1])
    last = block.index(top) if isinstance(top, ast.stmt) and top in block else -1
    if last <= first or not all(isinstance(each, (ast.If, ast.With)) for each in [*way[1:], *([top] if way else [])]):
        return None
    between = block[first + 1 : last]
    test = next((above.test for above in source.ancestors(step[1]) if isinstance(above, ast.If) and above in block), None)
    if test is None and not any(True for other in between for _ in inside(other, ast.Continue, ast.Return)):
        return None
    moved = [own[1]]
    for each in between:
        if (
            not isinstance(each, (ast.Expr, ast.Assign))
            or not isinstance(each.value, ast.Call)
            or not any(calls_inside(each.value, *_CLIPS))
        ):
            break
        moved.append(each)
    rest = [*between[len(moved) - 1 :], *([test] if test is not None else [])]
    if step[1] not in block:  # what comes after the condition's block runs where it fails, too
        rest += block[last + 1 :]
    alone = all(own_statement(site_at(source, each)) is not None for each in moved)
    apart = alone and not _stored(moved) & _names(rest) and not _names(moved) & _stored(rest)
    return Move(len(moved) > 1, test, moved_before(source, moved, step[1]) if apart else None)


def before_clipping(clip: ResolvedSite, scaled: ResolvedSite | None, scaler: str | None, optimizer: str | None) -> str | None:
    """`unscale_` put before a clipping, or brought there, where both run once for each other."""
    source = clip.source
    if source is None or clip.node is None or scaled is None or scaled.node is None or scaler is None or optimizer is None:
        return None
    if scaled.source is not source or scaled.enclosing_function is not clip.enclosing_function or skipped_update.guarded(clip, scaler):
        return None
    if loops_around(source, clip.node)[:1] != loops_around(source, scaled.node)[:1]:
        return None
    others = [call for call in calls_inside(source.tree, "unscale_") if isinstance(call.func, ast.Attribute)]
    if not others:
        return put_before(clip, f"{scaler}.unscale_({optimizer})")
    late = site_at(source, others[0])
    mine = len(others) == 1 and late.text == f"{scaler}.unscale_({optimizer})" and late.enclosing_function is clip.enclosing_function
    return brought_before(late, clip) if mine and late.line > clip.line else None


def _receiver(call: ast.Call) -> str | None:
    return ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else None


def _names(nodes: list[ast.AST] | list[ast.stmt]) -> set[str]:
    return {each.id for node in nodes for each in inside(node, ast.Name)}


def _stored(nodes: list[ast.AST] | list[ast.stmt]) -> set[str]:
    return {each.id for node in nodes for each in inside(node, ast.Name) if not isinstance(each.ctx, ast.Load)}
