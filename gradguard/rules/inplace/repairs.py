"""Small source repairs, as unified diffs against the user's file; None wherever it is not sure that the result is right."""

from __future__ import annotations

import ast

import torch

from gradguard.analysis.places.source import ResolvedSite
from gradguard.analysis.program.bindings import call_arguments, dotted
from gradguard.analysis.program.expressions import keyword
from gradguard.analysis.program.index import only
from gradguard.analysis.program.memory import memory_writes, peel
from gradguard.analysis.program.syntax import Source, range_of
from gradguard.core.diagnosis import Fix
from gradguard.fixes.edits import Edit, patched
from gradguard.rules.inplace.aliases import list_item

_OPERATORS = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.Div: "/",
    ast.FloorDiv: "//",
    ast.Mod: "%",
    ast.Pow: "**",
    ast.MatMult: "@",
    ast.BitAnd: "&",
    ast.BitOr: "|",
    ast.BitXor: "^",
    ast.LShift: "<<",
    ast.RShift: ">>",
}
_PLAIN = (ast.Name, ast.Attribute, ast.Subscript, ast.Call, ast.Constant, ast.List, ast.Tuple)
_RANDOM = frozenset(
    {"copy", "fill", "zero", "uniform", "normal", "random", "bernoulli", "exponential", "requires_grad", "set", "resize", "swap"}
)
_DRAWING = frozenset({"normal_", "uniform_", "random_", "bernoulli_", "exponential_", "log_normal_", "cauchy_", "geometric_"})


def out_of_place(place: ResolvedSite) -> tuple[str, str | None] | None:
    """The write as an expression that makes a new tensor: (what to write, diff). None where there is no mechanical form."""
    source, node = place.source, place.node
    if source is None:
        return None
    if isinstance(node, ast.AugAssign):
        return _augmented(source, node, place)
    if isinstance(node, ast.Call):
        return _flag_off(source, node) or _method(source, node)
    return None


def _augmented(source: Source, node: ast.AugAssign, place: ResolvedSite) -> tuple[str, str | None] | None:
    item = list_item(place)  # `rows[i] += x` of a list puts a new tensor in its place; of a tensor it writes into it
    name = source.flat(item) if item is not None and item is node.target else dotted(node.target)
    operator, whole = _OPERATORS.get(type(node.op)), range_of(node)
    if name is None or operator is None or whole is None:
        return None
    value = source.segment(node.value) or ""
    if not isinstance(node.value, _PLAIN):
        value = f"({value})"
    new = f"{name} = {name} {operator} {value}"
    return new, patched(source, [(whole, new)])


def _flag_off(source: Source, node: ast.Call) -> tuple[str, str | None] | None:
    """`F.relu(x, inplace=True)` without the flag, its result assigned."""
    flag = keyword(node, "inplace")
    whole = range_of(node)
    if flag is None or whole is None:
        return None
    text = source.text(whole) or ""
    edit = drop_argument(node, flag)
    if edit is None or "\n" in text:
        return None
    edits = [edit]
    statement = source.parents.get(node)
    name = dotted(node.args[0]) if node.args else None
    prefix = ""
    if isinstance(statement, ast.Expr):
        if name is None:
            return None
        prefix = f"{name} = "
        edits.append(((whole[0], whole[1], whole[0], whole[1]), prefix))
    (_, start, _, end), _ = edit
    offset = whole[1]
    raw = text.encode()
    new = prefix + (raw[: start - offset] + raw[end - offset :]).decode()
    return new, patched(source, edits)


def drop_argument(call: ast.Call, argument: ast.expr | ast.keyword) -> Edit | None:
    """The edit that takes an argument, with its comma, out of a call."""
    arguments = call_arguments(call)
    index = arguments.index(argument)
    own, before = range_of(argument), range_of(arguments[index - 1]) if index else None
    after = range_of(arguments[index + 1]) if index + 1 < len(arguments) else None
    if own is None:
        return None
    if before is not None:
        return (before[2], before[3], own[2], own[3]), ""
    return ((own[0], own[1], after[0], after[1]), "") if after is not None else (own, "")


def _method(source: Source, node: ast.Call) -> tuple[str, str | None] | None:
    """A chain of in-place methods as the same chain out of place: `x.sub_(a).div_(b)` -> `x.sub(a).div(b)`."""
    top: ast.expr = node
    while True:
        above = source.parents.get(top)
        outer = source.parents.get(above) if isinstance(above, ast.Attribute) else None
        if not (isinstance(above, ast.Attribute) and isinstance(outer, ast.Call) and outer.func is above and _out_name(above.attr)):
            break
        top = outer
    edits: list[Edit] = []
    current: ast.expr = top
    while isinstance(current, ast.Call) and isinstance(current.func, ast.Attribute):
        new, place = _out_name(current.func.attr), range_of(current.func)
        if new is None or place is None:
            break
        edits.append(((place[2], place[3] - len(current.func.attr), place[2], place[3]), new))
        library = isinstance(current.func.value, ast.Name) and current.func.value.id in ("torch", "F")
        current = current.args[0] if library and current.args else current.func.value
    whole = range_of(top)
    if not edits or whole is None or whole[0] != whole[2] or _in_place_left(current):
        return None
    keyed = isinstance(current, ast.Subscript) and isinstance(current.slice, ast.Constant) and isinstance(current.slice.value, str)
    name = source.flat(current) if keyed else dotted(current)  # `batch["x"].clamp_(0, 1)`: a dict's item can be replaced
    prefix = ""
    if isinstance(source.parents.get(top), ast.Expr):
        if name is None:
            return None
        prefix = f"{name} = "
    raw = (source.text(whole) or "").encode()
    for (_, start, _, end), new in sorted(edits, reverse=True):
        raw = raw[: start - whole[1]] + new.encode() + raw[end - whole[1] :]
    text = prefix + raw.decode()
    return text, patched(source, [(whole, text)])


def drawn(place: ResolvedSite) -> list[Fix]:
    """New random values in a new tensor: `self.noise = torch.empty_like(self.noise).normal_()`."""
    source, node, statement = place.source, place.node, place.statement
    if source is None or not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.func.attr not in _DRAWING:
        return []
    name, whole = dotted(node.func.value), range_of(node)
    torch_name = next((called for called, full in source.imports.items() if full == "torch"), None)
    if name is None or whole is None or torch_name is None or not isinstance(statement, ast.Expr) or statement.value is not node:
        return []
    text = f"{name} = {torch_name}.empty_like({source.flat(node).replace(name, f'{name})', 1)}"
    return [Fix(title=f"draw into a new tensor each time: `{text}`", safety="safe", patch=patched(source, [(whole, text)]))]


def _in_place_left(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr.endswith("_")


def _out_name(name: str) -> str | None:
    if not name.endswith("_") or name.startswith("_") or name[:-1] in _RANDOM:
        return None
    return name[:-1] if hasattr(torch.Tensor, name[:-1]) else None


def under_no_grad(place: ResolvedSite) -> str | None:
    """The diff that puts the place's statement under `with torch.no_grad():`."""
    source, statement = place.source, place.statement
    if source is None or statement is None:
        return None
    loop = source.parents.get(statement)
    if isinstance(loop, (ast.For, ast.While)) and loop.body == [statement] and not loop.orelse:
        statement = loop  # the whole loop, where it does nothing else
    elif isinstance(statement, (ast.If, ast.For, ast.While, ast.With, ast.FunctionDef)):
        return None
    run = [statement, *_same_writes_below(source, statement)]
    first, last = statement.lineno, run[-1].end_lineno or run[-1].lineno
    line = source.lines[first - 1]
    indent = line[: len(line) - len(line.lstrip())]
    if line[: statement.col_offset].strip() or "torch" not in source.imports:
        return None
    body = "".join(f"    {text}" if text.strip() else text for text in source.lines[first - 1 : last])
    end = len(source.lines[last - 1].encode())
    return patched(source, [((first, 0, last, end), f"{indent}with {source_name(source, 'torch')}.no_grad():\n{body}")])


def _same_writes_below(source: Source, statement: ast.stmt) -> list[ast.stmt]:
    """The statements right below that write into the same variable: they would be refused next."""
    written = _base_of_write(source, statement)
    above = source.parents.get(statement)
    block = next((body for _, body in ast.iter_fields(above) if isinstance(body, list) and statement in body), []) if above else []
    found: list[ast.stmt] = []
    for below in block[block.index(statement) + 1 :] if written is not None and block else []:
        if _base_of_write(source, below) != written:
            break
        found.append(below)
    return found


def _base_of_write(source: Source, statement: ast.stmt) -> str | None:
    """The variable that a statement alone writes into in place: of `b[:, 4] += 1`, `b[0] = x`, `b.mul_(2)`."""
    written = {dotted(peel(write.written)[0]) for write in memory_writes(source, statement)}
    return only(written)


def source_name(source: Source, module: str) -> str:
    """What the file calls a module."""
    return next((name for name, full in source.imports.items() if full == module), module)
