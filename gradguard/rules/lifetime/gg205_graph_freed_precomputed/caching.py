"""Caches of torch's and of Python's own that keep a graph: `parametrize.cached()` and `functools.lru_cache`."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from gradguard.analysis.history.carried_graphs import Carrier
from gradguard.analysis.live.stores import Store, returns_of
from gradguard.analysis.places.source import function_def, resolve
from gradguard.analysis.program.bindings import dotted, full_name
from gradguard.analysis.program.syntax import load, span_of
from gradguard.core.diagnosis import Fix, SourceSpan
from gradguard.fixes.edits import edit_of, patched
from gradguard.fixes.statements import swapped
from gradguard.rules.lifetime.second_backward import Study
from gradguard.torch_compat.private_api import parametrization_cache


@dataclass(frozen=True)
class CachedBlock:
    """The `with parametrize.cached():` that stays open."""

    code: str
    span: SourceSpan

    @property
    def text(self) -> str:
        return f"`{self.code}`"


def cached_parametrization(study: Study) -> CachedBlock | None:
    """The block that holds the old graph, when torch's own cache of parametrized tensors is what does."""
    carriers = {node for carrier in study.carriers for node in carrier.link.carriers}
    if not any(getattr(tensor, "grad_fn", None) in carriers for tensor in parametrization_cache()):
        return None
    for view in study.incident.user_frames:
        place = resolve(view.site)
        if place is None or place.source is None:
            continue
        for block in place.enclosing_withs():
            called = block.node.func if isinstance(block.node, ast.Call) else block.node
            name = place.source.flat(called)
            if full_name(place.source, name).endswith("parametrize.cached"):
                return CachedBlock(
                    block.text,
                    block.span.model_copy(
                        update={"role": "culprit", "label": "held open over several steps: each parametrized tensor is computed once"}
                    ),
                )
    return None


def opened_in_loop(block: CachedBlock) -> str | None:
    """The diff that opens the block in each iteration of the loop that it now stands around."""
    source = load(block.span.file)
    statement = None if source is None else source.statement_at(block.span.line)
    if source is None or not isinstance(statement, ast.With) or not isinstance(statement.body[0], (ast.For, ast.While)):
        return None
    return swapped(source, statement, statement.body[0])


@dataclass(frozen=True)
class Memoized:
    """A function whose results are kept."""

    name: str
    span: SourceSpan
    decorator: str | None = None  # as written, where the function is decorated


def memoized(carrier: Carrier) -> Memoized | None:
    """The `lru_cache` or `cache` function that holds the tensor: pointed at is the decorator, or else what the function returns."""
    holding = carrier.holding
    if holding is None or not any("lru_cache" in kind for kind in holding.through):
        return None
    wrapper = holding.wrapper
    code = getattr(getattr(wrapper, "__wrapped__", None), "__code__", None)
    node = None if code is None else function_def(code)
    source = None if code is None else load(code.co_filename)
    if code is None or node is None or source is None:
        return None
    label = "keeps the results with their graph"
    for decorator in getattr(node, "decorator_list", ()):
        name = source.flat(decorator.func if isinstance(decorator, ast.Call) else decorator)
        if full_name(source, name) in ("functools.lru_cache", "functools.cache"):
            return Memoized(code.co_name, span_of(code.co_filename, decorator, label, "culprit"), source.flat(decorator))
    returns = returns_of(node)
    return Memoized(code.co_name, span_of(code.co_filename, returns[0] if len(returns) == 1 else node, label, "culprit"))


def plain_property(store: Store) -> Fix | None:
    """`@property` in place of a decorator that keeps the result in the instance."""
    function = store.function
    if not isinstance(store.statement, ast.Return) or not isinstance(function, ast.FunctionDef):
        return None
    for decorator in function.decorator_list:
        called = dotted(decorator.func if isinstance(decorator, ast.Call) else decorator) or ""
        if called.rpartition(".")[2] == "cached_property":
            return Fix(
                title=f"make `{function.name}` a plain `@property` in place of `@{called}`",
                safety="unsafe",
                detail="what is made from parameters is good for one step; each read then computes it anew",
                patch=patched(store.source, edit_of(decorator, "property")),
            )
    return None
