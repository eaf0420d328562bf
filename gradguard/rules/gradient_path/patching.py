"""Mechanical repairs as unified diffs: one expression replaced in place."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from itertools import takewhile

from gradguard.analysis.history.cut_origins import Origin, callee_name
from gradguard.analysis.history.grad_mode_switches import Switch
from gradguard.analysis.places.sites import site_at
from gradguard.analysis.places.source import ResolvedSite
from gradguard.analysis.program.bindings import dotted
from gradguard.analysis.program.expressions import inside, last_part
from gradguard.analysis.program.syntax import FUNCTIONS, Source, load
from gradguard.core.diagnosis import Fix
from gradguard.fixes.at_places import own_statement, spelt
from gradguard.fixes.edits import indent_of, removed, replaced
from gradguard.fixes.restacked import restacked, stacked
from gradguard.fixes.statements import Layout, unwrapped
from gradguard.rules.gradient_path import wording

_LEARNS = ("backward", "grad", "step", "set_grad_enabled", "enable_grad", "__exit__")  # what is for grad mode, or switches it itself

_ARITHMETIC = (ast.BinOp, ast.UnaryOp, ast.DictComp, ast.ListComp, ast.GeneratorExp, ast.Dict, ast.List, ast.Tuple)


def with_patch(fix: Fix, origin: Origin, others: Sequence[Origin] = ()) -> Fix:
    """The fix with a patch where the change is mechanical and the place is certain.

    Args:
        others: further origins of the same lost path; those cut by the same statement are repaired together.
    """
    place = origin.place
    if origin.switch is not None and origin.kind in ("no_grad", "inference"):
        patch = _with_grad_mode(origin.switch, place)
        return fix if patch is None else fix.model_copy(update={"patch": patch, "safety": "unsafe"})
    if place is None or place.source is None:
        return fix
    both = restacked(place) if origin.kind == "escape" else None
    if both is not None:
        rest = "put the list together with `torch.stack`" if both.stacked else "not in a new tensor"
        updates = {"title": f"{fix.title.partition(', and keep')[0]}, and {rest}"}
        return fix.model_copy(update=updates if both.patch is None else {**updates, "patch": both.patch, "safety": "unsafe"})
    chosen = stacked(place.source, place.node) if origin.kind == "rewrap" and isinstance(place.node, ast.Call) else None
    if chosen is not None:
        detail = "`clamp` stays a tensor where `max` and `min` may give the number; `torch.stack` keeps the graph of every element."
        return fix.model_copy(update={"patch": chosen, "safety": "unsafe", "detail": detail})
    if not origin.certain:
        return fix
    beside = [other for other in others if other is not origin and other.place is not None and other.place.statement is place.statement]
    edits = [_edit(place, place.source, origin), *(_edit(other.place, place.source, other) for other in beside if other.place)]
    certain = [edit for edit in edits if edit is not None]
    if edits[0] is None or len(certain) != len(edits):
        return fix
    patch = _without(place, certain) or replaced(place.source, list(dict(certain).items()))
    if patch is None:
        return fix
    names = list(dict.fromkeys(f"`{item.inner}`" for item in (origin, *beside) if item.inner))
    title = f"Drop `{wording.operation(origin)}` from {' and '.join(names)}" if beside and len(names) > 1 else fix.title
    return fix.model_copy(update={"patch": patch, "title": title})


def _with_grad_mode(switch: Switch, place: ResolvedSite | None) -> str | None:
    """The diff that takes the computation out of the block that switches grad mode off, or the decorator off its function."""
    source = load(switch.span.file)
    statement = None if source is None else source.statement_at(switch.span.line)
    if source is None or statement is None:
        return None
    if switch.how == "decorator" and isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
        mark = next((item for item in statement.decorator_list if item.lineno == switch.span.line), None)
        return None if mark is None else removed(source, mark.lineno, mark.end_lineno or mark.lineno)
    if switch.how == "left_on":
        return _for_the_rest(source, statement, wording.block_of(switch.text))
    if not isinstance(statement, ast.With) or len(statement.items) != 1:
        return None
    if switch.how == "yield":  # what is computed stays in the block, only the rest of the program leaves it
        layout, last = Layout(source), statement.body[-1]
        if len(statement.body) == 1 or not isinstance(last, ast.Expr) or not isinstance(last.value, (ast.Yield, ast.YieldFrom)):
            return None
        layout.reindent(last, indent_of(source, statement.lineno))
        return layout.diff()
    inside = place is not None and place.file == source.filename and any(place.statement is item for item in statement.body)
    alone = len(statement.body) == 1  # what it calls may be elsewhere
    return unwrapped(source, statement) if switch.how == "with" and (inside or alone) else None


def term_without_item(origin: Origin, term: ResolvedSite | None) -> str | None:
    """The diff that drops `.item()` from a term of the loss, where what it is assigned to is read there only, or as `float(...)`.

    It may stand in a sum over parts, and in a function that nothing but the term calls.
    """
    place = origin.place
    node = None if place is None else place.node
    if place is None or place.source is None or term is None or term.source is not place.source or not origin.certain:
        return None
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.func.attr != "item" or node.args or node.keywords:
        return None
    source, statement = place.source, place.statement
    way = list(takewhile(lambda each: each is not statement, source.ancestors(node)))
    if not all(isinstance(each, _ARITHMETIC) or _is_summed(each) for each in way):
        return None
    if isinstance(statement, ast.Return):
        function = place.enclosing_function
        if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)) or not _is_for(function.name, source, term):
            return None
    elif place.enclosing_function is not term.enclosing_function:
        return None
    elif statement is not term.statement:
        target = statement.targets[0] if isinstance(statement, ast.Assign) and len(statement.targets) == 1 else None
        scope = place.enclosing_function or source.tree
        if not isinstance(target, ast.Name):
            return None
        reads = [each for each in inside(scope, ast.Name) if each.id == target.id and each is not target]
        if not all(source.statement(each) is term.statement or _as_number(source, each) for each in reads):
            return None
    text = source.segment(node.func.value)
    return None if text is None else replaced(source, [(node, text)])


def _is_summed(node: ast.AST) -> bool:
    """Whether it is Python's sum over parts, which is a tensor where each of them is."""
    return isinstance(node, ast.Call) and dotted(node.func) == "sum" and len(node.args) == 1 and not node.keywords


def _is_for(function: str, source: Source, term: ResolvedSite) -> bool:
    """Whether the only thing in the file that names a function is the statement of a term."""
    named = [each for each in inside(source.tree, ast.Name) if each.id == function]
    named += [each for each in inside(source.tree, ast.Attribute) if each.attr == function]  # type: ignore[misc]
    return bool(named) and all(source.statement(each) is term.statement for each in named)


def _as_number(source: Source, read: ast.AST) -> bool:
    """Whether a value, or each in a dict or list that is iterated, is read as `float(...)` only."""
    above = source.parents.get(read)
    if isinstance(above, ast.Call) and read in above.args:
        return dotted(above.func) == "float"
    if isinstance(above, ast.Attribute) and above.attr in ("items", "values") and isinstance(call := source.parents.get(above), ast.Call):
        read, above = call, source.parents.get(call)
    if not isinstance(above, ast.comprehension) or above.iter is not read:
        return False
    target = above.target.elts[-1] if isinstance(above.target, ast.Tuple) else above.target
    whole = source.parents.get(above)
    if not isinstance(target, ast.Name) or whole is None:
        return False
    values = [each for each in inside(whole, ast.Name) if each.id == target.id and each is not target]
    return all(isinstance(call := source.parents.get(each), ast.Call) and dotted(call.func) == "float" for each in values)


def _for_the_rest(source: Source, statement: ast.stmt, block: str) -> str | None:
    """The diff that makes a call which switches grad mode off a block around what follows it in its function."""
    function, own = source.parents.get(statement), own_statement(site_at(source, statement))
    if not isinstance(function, ast.FunctionDef) or own is None or not isinstance(statement, ast.Expr):
        return None
    rest = function.body[function.body.index(statement) + 1 :]
    known = block if block != "torch.no_grad()" else spelt(source, block.removesuffix("()"))
    odd = (*FUNCTIONS, ast.ClassDef, ast.Yield, ast.YieldFrom, ast.Await)
    if (
        known is None
        or not any(True for each in rest for _ in inside(each, ast.Call))
        or any(
            isinstance(node, odd) or (isinstance(node, ast.Call) and last_part(node) in _LEARNS)
            for each in rest
            for node in inside(each, ast.AST)
        )
    ):
        return None
    layout, indent = Layout(source), indent_of(source, statement.lineno)
    layout.drop(statement)
    layout.put(statement.end_lineno or statement.lineno, [f"{indent}with {known if known.endswith(')') else f'{known}()'}:\n"])
    for each in rest:
        layout.reindent(each, indent + "    ")
    return layout.diff()


def _without(place: ResolvedSite, edits: list[tuple[ast.AST, str]]) -> str | None:
    """The diff without the statement, where it would only assign a name to itself: `h = h.detach()`."""
    statement, source = place.statement, place.source
    if not isinstance(statement, ast.Assign) or source is None or len(statement.targets) != 1 or len(edits) != 1:
        return None
    node, text = edits[0]
    if statement.value is not node or source.flat(statement.targets[0]) != text or statement.end_lineno != statement.lineno:
        return None
    if source.lines[statement.lineno - 1].partition("#")[0].strip() != source.flat(statement):
        return None  # not alone on its line
    above = source.parents.get(statement)
    alone = any(getattr(above, block, None) == [statement] for block in ("body", "orelse", "finalbody"))
    return replaced(source, [(statement, "pass")]) if alone else removed(source, statement.lineno, statement.lineno)


def _edit(place: ResolvedSite, source: Source, origin: Origin) -> tuple[ast.AST, str] | None:
    """The node to change, and its new text."""
    node = place.node
    if wording.rule_of(origin) == "GG302" and origin.kind in ("detach", "data"):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "detach" and not node.args:
            return _unless_wrapped(source, node, node.func.value)
        if isinstance(node, ast.Attribute) and node.attr == "data":
            return _unless_wrapped(source, node, node.value)
    if origin.kind == "sample" and isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and callee_name(place) == "sample":
        text = source.flat(node)
        receiver = source.flat(node.func.value)
        return (node, receiver + ".r" + text[len(receiver) + 1 :]) if text.startswith(receiver + ".sample") else None
    if (
        origin.kind == "rewrap"
        and isinstance(node, ast.Call)
        and len(node.args) == 1
        and all(_is_moot(keyword) for keyword in node.keywords)
        and place.callee_full_name in ("torch.tensor", "torch.as_tensor", "torch.asarray")
        and not _switched_on(place)
    ) and (_is_flat(node.args[0]) or (origin.cut is not None and origin.cut.flat)):
        library = source.flat(node.func).rpartition(".")[0] or "torch"
        return (node, f"{library}.stack({source.flat(node.args[0])})") if node.keywords else (node.func, f"{library}.stack")
    if isinstance(node, ast.Call) and origin.func in ("autograd.grad", "grad"):
        text, given = source.flat(node), [keyword.arg for keyword in node.keywords]
        if not text.endswith(")") or None in given or "create_graph" in given:
            return None
        return node, f"{text[:-1].rstrip().rstrip(',')}, create_graph=True)"
    if wording.rule_of(origin) == "GG304" and isinstance(node, ast.Compare) and isinstance(node.left, (ast.Name, ast.Attribute)):
        cast = source.parents.get(source.parents.get(node, node))  # `(x > threshold).float()`
        called = cast.func.attr if isinstance(cast, ast.Call) and isinstance(cast.func, ast.Attribute) else None
        return (cast, source.flat(node.left)) if cast is not None and called in ("float", "double", "half", "to", "type") else None
    return None


def _switched_on(place: ResolvedSite) -> bool:
    """Whether the function sets `requires_grad` of the result, which PyTorch refuses for what has a graph."""
    scope = place.enclosing_function or (None if place.source is None else place.source.tree)
    names = {f"{target}.requires_grad" for target in place.targets}
    return any(isinstance(node.ctx, ast.Store) and dotted(node) in names for node in inside(scope, ast.Attribute))


def _is_moot(keyword: ast.keyword) -> bool:
    """Whether an argument says nothing that the tensors themselves do not have: a graph, their device, the default dtype."""
    return keyword.arg in ("requires_grad", "device") or (
        keyword.arg == "dtype" and dotted(keyword.value) in ("torch.float", "torch.float32")
    )


def _is_flat(node: ast.expr) -> bool:
    """A list of tensors, not of lists: `torch.stack` takes no other."""
    items = [node.elt] if isinstance(node, ast.ListComp) else node.elts if isinstance(node, ast.List) else []
    return bool(items) and not any(
        isinstance(item, (ast.List, ast.Tuple, ast.ListComp)) or (isinstance(item, ast.Subscript) and isinstance(item.slice, ast.Slice))
        for item in items
    )


def _unless_wrapped(source: Source, node: ast.expr, inner: ast.expr) -> tuple[ast.AST, str] | None:
    """Dropping `.detach()` from `x.detach().numpy()` or from `Variable(x.data)` would not repair anything."""
    above = source.parents.get(node)
    if isinstance(above, ast.Attribute) and above.attr in ("numpy", "tolist", "item", "cpu", "data", "requires_grad_"):
        return None
    if isinstance(above, ast.Call) and node in above.args:
        full = source.flat(above.func).rpartition(".")[2]
        if full in ("Variable", "tensor", "as_tensor", "Parameter", "float", "int", "array", "asarray", "deepcopy"):
            return None
    return node, source.flat(inner)
