"""What a new tensor in place of a write reaches: a name that is rebound is seen by its own function alone.

`def cap(module, inputs, output): output.clamp_(-1, 1)` changes what the caller has; `output = output.clamp(-1, 1)` changes nothing,
unless the function goes on to use the name or returns it.
"""

from __future__ import annotations

import ast

from gradguard.analysis.places.source import ResolvedSite
from gradguard.analysis.program.defuse import reads_of
from gradguard.analysis.program.expressions import keyword
from gradguard.analysis.program.index import program_of
from gradguard.analysis.program.syntax import range_of
from gradguard.core.diagnosis import Fix
from gradguard.fixes.edits import patched
from gradguard.rules.inplace.aliases import parameters_of

_FORWARD_HOOKS = frozenset({"register_forward_hook", "register_module_forward_hook"})


def reaches_nobody(place: ResolvedSite, name: str | None) -> bool:
    """Whether a rebound `name` would be lost: a parameter of the function around that nothing reads after the write."""
    function, statement = place.enclosing_function, place.statement
    if name is None or function is None or statement is None or name not in parameters_of(function):
        return False
    if place.enclosing_loops:  # the next turn may read it
        return not any(read is not None and read.lineno != statement.lineno for read in reads_of(function, name))
    end = statement.end_lineno or statement.lineno
    return not any(read.lineno > end for read in reads_of(function, name))


def returned_instead(place: ResolvedSite, name: str, new: str) -> Fix:
    """The new tensor given back to the caller; as a patch where the function is a forward hook that ends with the write.

    Args:
        new: the assignment that `out_of_place` gives: `output = output.clamp(-1, 1)`.
    """
    value = new.removeprefix(f"{name} = ")
    function = getattr(place.enclosing_function, "name", "the function")
    if not _is_forward_hook(place, name):
        return Fix(
            title=f"make a new tensor, return it from `{function}` and use it in the caller: `return {value}`",
            safety="manual",
            detail=f"`{name}` is the caller's tensor: a new value under this name alone would be lost",
        )
    patch = None
    body = getattr(place.enclosing_function, "body", [])
    statement, source = place.statement, place.source
    if source is not None and isinstance(statement, ast.Expr) and body and body[-1] is statement:
        where = range_of(statement)
        patch = None if where is None else patched(source, [(where, f"return {value}")])
    return Fix(
        title=f"return a new tensor from the hook: `return {value}`",
        safety="safe" if patch else "manual",
        detail="what a forward hook returns takes the place of the module's output",
        patch=patch,
    )


def _is_forward_hook(place: ResolvedSite, name: str) -> bool:
    """Whether the file registers the function, which returns nothing, and the name is the last of its parameters: the output."""
    function, program = place.enclosing_function, program_of(place.source)
    if program is None or function is None or program.returns(function):
        return False
    positional = [*function.args.posonlyargs, *function.args.args]
    calls = [call for call in program.calls(*_FORWARD_HOOKS) if not keyword(call, "with_kwargs") and not keyword(call, "always_call")]
    hooked = any(function in program.functions(call.args[0]) for call in calls if call.args)
    return hooked and bool(positional) and positional[-1].arg == name
