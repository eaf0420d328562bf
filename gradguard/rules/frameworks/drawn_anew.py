"""What a checkpointed function draws from a random generator that checkpointing does not put back: Python's, numpy's, one of its own."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from types import FunctionType, MethodType
from typing import Any

from torch import nn

from gradguard.callsite import USER_FILES
from gradguard.evidence.bindings import dotted, full_name, targets_of
from gradguard.evidence.frames import traceback_frames
from gradguard.evidence.source import ResolvedSite, function_def
from gradguard.evidence.syntax import FUNCTIONS, Source, load
from gradguard.rules.gradient_path.places import site_at
from gradguard.rules.incident import Incident
from gradguard.rules.protocol.places import class_node
from gradguard.safe_read import function_code, modules_in, unless_loud
from gradguard.torch_internals import checkpointed_function

_DRAWS = (
    "random", "randint", "randrange", "choice", "choices", "sample", "shuffle", "uniform", "triangular", "gauss", "normalvariate",
    "betavariate", "expovariate", "getrandbits", "rand", "randn", "normal", "permutation", "binomial", "beta", "gamma", "random_sample",
    "standard_normal", "exponential", "poisson", "geometric", "multinomial", "dirichlet", "laplace",
)  # fmt: skip


def function_run_again(incident: Incident) -> Any:
    """The function whose recomputation has failed; None where the exception's frames do not tell."""
    for view in traceback_frames(None if incident.error is None else incident.error.__traceback__):
        if view.code_name == "unpack_hook":
            found = checkpointed_function(view.locals.get("frame"))
            if found is not None:
                return found
    return None


def draws_in(function: Any) -> list[ResolvedSite]:
    """Where such a generator decides what a checkpointed function, or a module that it runs, does: by its source."""
    found: dict[tuple[str, int, int | None], ResolvedSite] = {}
    for source, tree in _bodies(function):
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and _draws(source, node) and _decides(source, node):
                place = site_at(source, node)
                found.setdefault((place.file, place.line, place.column), place)
    return [found[key] for key in sorted(found, key=lambda key: (key[0], key[1], key[2] or 0))]


def _bodies(function: Any) -> Iterator[tuple[Source, ast.AST]]:
    """The source of a function, and of the classes of the user's modules that it is, belongs to or closes over."""
    while isinstance(function, functools.partial):
        function = function.func
    code = function_code(function)
    if code is not None:
        tree, source = function_def(code), load(code.co_filename)
        if tree is not None and source is not None and USER_FILES[code.co_filename]:
            yield source, tree
    for kind in dict.fromkeys(base for module in modules_of(function) for base in type(module).__mro__):
        found = None if kind.__module__.partition(".")[0] == "torch" or not issubclass(kind, nn.Module) else class_node(kind)
        if found is not None:
            yield found


def modules_of(function: Any) -> list[nn.Module]:
    """The modules that a function is, belongs to or closes over, with all their parts."""
    while isinstance(function, functools.partial):
        function = unless_loud(function.func)
    owners = [function]
    if isinstance(function, MethodType):
        owners, function = [unless_loud(function.__self__)], unless_loud(function.__func__)
    if isinstance(function, FunctionType):
        for cell in function.__closure__ or ():
            try:
                owners.append(unless_loud(cell.cell_contents))
            except ValueError:
                continue
    return [module for owner in owners if isinstance(owner, nn.Module) for module in modules_in(owner)]


def _draws(source: Source, node: ast.Call) -> bool:
    name = dotted(node.func)
    full = None if name is None else full_name(source, name)
    if full is None:
        return False
    module, _, last = full.rpartition(".")
    if module in ("random", "numpy.random"):
        return last in _DRAWS
    # torch's own functions, from a generator that was made for the purpose
    given = next((word.value for word in node.keywords if word.arg == "generator"), None)
    return module == "torch" and given is not None and not (isinstance(given, ast.Constant) and given.value is None)


def _decides(source: Source, draw: ast.AST) -> bool:
    """Whether what is drawn chooses a branch, an index or a number of rounds, there or by the variable it is given to."""
    around = next((above for above in source.ancestors(draw) if isinstance(above, FUNCTIONS)), None)
    if around is None or getattr(around, "name", None) == "__init__":
        return False
    if _chooses(source, draw) or (isinstance(source.statement(draw), ast.Return) and getattr(around, "name", None) != "forward"):
        return True
    statement = source.statement(draw)
    names = {target.id for target in targets_of(statement) if isinstance(target, ast.Name)} if statement is not None else set()
    return any(
        isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in names and _chooses(source, node)
        for node in ast.walk(around)
    )


def _chooses(source: Source, node: ast.AST) -> bool:
    for above in source.ancestors(node):
        if isinstance(above, (ast.If, ast.While, ast.IfExp)):
            if node is above.test:
                return True
        elif isinstance(above, ast.comprehension):
            if node in above.ifs or node is above.iter:
                return True
        elif (isinstance(above, ast.For) and node is above.iter) or (isinstance(above, ast.Subscript) and node is above.slice):
            return True
        if isinstance(above, ast.stmt):
            return False
        node = above
    return False
