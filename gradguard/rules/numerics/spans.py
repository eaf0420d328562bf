"""Lines of graph nodes, traced or not, and the words for what stands there."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

from gradguard.analysis.graph.recompute import node_kind
from gradguard.analysis.graph.walk import op_name
from gradguard.analysis.incident import Incident
from gradguard.analysis.places.sites import site_at
from gradguard.analysis.places.source import ResolvedSite, resolve
from gradguard.analysis.program.bindings import dotted
from gradguard.analysis.program.expressions import inside, last_part
from gradguard.analysis.program.syntax import Source
from gradguard.analysis.program.user_files import sources_of
from gradguard.core.safe_read import function_code, in_class, modules_in, named_modules
from gradguard.monitors.numerics import Numbers
from gradguard.rules.numerics import derived
from gradguard.rules.numerics.derived import derived_by

UNSEEN = (
    "this step was not traced and no traced step was like it; the line was looked for in the source, where only one fits (`level: strict`"
    " traces every step)"
)
NOT_FOUND = (
    "this step was not traced and no traced step was like it, so the line is not known; `level: strict` (or GRADGUARD_LEVEL=strict) traces"
    " every step and names it"
)

_OPERATORS: dict[str, type[ast.operator]] = {
    "Div": ast.Div,
    "Mul": ast.Mult,
    "Pow": ast.Pow,
    "Mm": ast.MatMult,
    "Bmm": ast.MatMult,
    "Add": ast.Add,
    "Sub": ast.Sub,
}
_ARITHMETIC: dict[str, type[ast.operator]] = {"Add": ast.Add, "Sub": ast.Sub, "Mul": ast.Mult, "Div": ast.Div, "Pow": ast.Pow}
_ALIASES = {
    "Acos": ("acos", "arccos"),
    "Asin": ("asin", "arcsin"),
    "Pow": ("pow", "square"),
    "LinalgSvd": ("svd", "pinv"),
    "LinalgEigh": ("eigh", "symeig"),
    "Div": ("div", "true_divide"),
    "LinalgVectorNorm": ("norm", "vector_norm"),
    "LogSoftmax": ("log_softmax", "cross_entropy"),
    "Std": ("std", "std_mean"),
    "Var": ("var", "var_mean"),
    "NllLoss": ("nll_loss", "cross_entropy"),
    "Mm": ("matmul", "mm"),
    "Bmm": ("matmul", "bmm", "einsum"),
}


class Places:
    """The lines of one graph's nodes.

    Args:
        incident: whose journal and frames are searched.
        numbers: whose footprints of traced steps help where this step was not traced.
        nodes: all nodes of the graph.
    """

    def __init__(self, incident: Incident, numbers: Numbers, nodes: Sequence[Any]) -> None:
        self.incident = incident
        self.numbers = numbers
        self.nodes = nodes
        self.notes: list[str] = []

    def of(self, node: Any, search: bool = False) -> ResolvedSite | None:
        """A node's line; with `search`, looked for in the source where the trace does not tell (and noted)."""
        place = resolve(self.numbers.footprints.site(self.incident.journal, node, self.nodes))
        if place is not None or not search:
            return place
        call = derived_by(self.incident.journal, node)
        if call is not None:  # no line of the program made it: what fits in the source would be another op
            self.notes.append(derived.note(call))
            return None
        place = self._only_fit(node)
        self.notes.append(NOT_FOUND if place is None else UNSEEN)
        return place

    def _only_fit(self, node: Any) -> ResolvedSite | None:
        """The one place in the user's files that this kind of op can stand at."""
        kind = node_kind(node)
        names = _ALIASES.get(kind, (kind.lower(),))
        found: dict[tuple[str, int], ResolvedSite] = {}
        better: dict[tuple[str, int], ResolvedSite] = {}  # those whose operands can be recognised in the graph
        for source in sources_of(self._files()):
            for item in inside(source.tree, ast.Call, ast.BinOp):
                agreed = _operands_fit(item, node) if _is_op(item, kind, names) and _with_gradient(source, item) else None
                if agreed is not None:
                    found.setdefault((source.filename, item.lineno), site_at(source, item))
                    if agreed:
                        better.setdefault((source.filename, item.lineno), site_at(source, item))
        if len(better) == 1:
            found = better
        return next(iter(found.values())) if len(found) == 1 else None

    def _files(self) -> list[str]:
        files: dict[str, None] = {}
        for view in self.incident.user_frames:
            files.setdefault(view.frame.f_code.co_filename)
        for _, root in self.incident.names.modules[:8]:
            for module in modules_in(root):
                code = function_code(in_class(type(module), "forward"))
                if code is not None and not type(module).__module__.startswith("torch."):
                    files.setdefault(code.co_filename)
        return list(files)


def _is_op(item: ast.Call | ast.BinOp, kind: str, names: tuple[str, ...]) -> bool:
    if isinstance(item, ast.BinOp):
        numbers = all(isinstance(side, ast.Constant) for side in (item.left, item.right))
        return kind in _OPERATORS and isinstance(item.op, _OPERATORS[kind]) and not numbers
    called = last_part(item)
    return called.rstrip("_") in names and not (isinstance(item.func, ast.Attribute) and dotted(item.func.value) in ("math", "np", "numpy"))


_PLAIN_CALLS = frozenset(
    {"sum", "mean", "exp", "log", "sqrt", "softmax", "sigmoid", "tanh", "std", "var", "relu", "abs", "clamp", "cumsum", "prod"}
)


def _operands_fit(item: ast.Call | ast.BinOp, node: Any) -> int | None:
    """How many operands as written are what the graph has (`torch.exp(0.5 * x)` has a product below it); None where one contradicts it."""
    agreed = 0
    if isinstance(item, ast.BinOp):
        written: list[ast.expr] = [item.left, item.right]
    else:
        method = isinstance(item.func, ast.Attribute) and dotted(item.func.value) not in (
            "torch",
            "F",
            "torch.nn.functional",
            "torch.linalg",
        )
        written = [item.func.value] if method and isinstance(item.func, ast.Attribute) else item.args[:1]
    sources = [source for source, _ in node.next_functions]
    if len(sources) < len(written):
        written = [part for part in written if not isinstance(part, ast.Constant)][: len(sources)]
    for part, source in zip(written, sources, strict=False):
        below = "" if source is None else node_kind(source)
        if isinstance(part, ast.BinOp):
            wanted = next((kind for kind, operator in _ARITHMETIC.items() if isinstance(part.op, operator)), None)
            if below and wanted is not None and below != wanted and not (wanted == "Sub" and below == "Rsub"):
                return None
            agreed += below == wanted
        elif isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute) and part.func.attr in _PLAIN_CALLS:
            if below and not below.lower().startswith(part.func.attr):
                return None
            agreed += bool(below)
        elif isinstance(part, ast.Name) and not below and source is not None:
            return None
    return agreed


def _with_gradient(source: Source, item: ast.AST) -> bool:
    """Whether a graph node can come from here: not from a constructor, nor from where gradients are off."""
    for above in source.ancestors(item):
        around: list[ast.expr] = []
        if isinstance(above, (ast.FunctionDef, ast.AsyncFunctionDef)):
            if above.name == "__init__":
                return False
            around = above.decorator_list
        elif isinstance(above, (ast.With, ast.AsyncWith)):
            around = [part.context_expr for part in above.items]
        if any(word in ast.dump(part) for part in around for word in ("no_grad", "inference_mode")):
            return False
    return True


def expression(place: ResolvedSite | None, node: Any) -> str:
    """What stands at a node's line, short; the op's name where no line is known."""
    if place is not None and place.text:
        value = place.node.value if isinstance(place.node, (ast.Assign, ast.AnnAssign)) else place.node
        text = place.source.flat(value) if place.source is not None and value is not None else place.text
        flat = " ".join(text.split())
        return flat if len(flat) <= 80 else flat[:77].rstrip() + "..."
    return op_name(node)


def module_at(place: ResolvedSite | None, incident: Incident) -> str | None:
    """The path of the module whose method the place is in, if only one such module is alive."""
    owner = None if place is None else place.enclosing_class
    if owner is None:
        return None
    fitting = []
    for variable, root in incident.names.modules:
        for path, module in named_modules(root):
            if type(module).__name__ == owner.name:
                fitting.append(".".join(part for part in (variable, path) if part) or owner.name)
    distinct = list(dict.fromkeys(fitting))
    return distinct[0] if len(distinct) == 1 else None


def operands_at(place: ResolvedSite | None, node: Any, count: int) -> list[str]:
    """What stands at a node's line for each of its operands; empty where the two cannot be matched for sure.

    Args:
        count: how many operands the node has.
    """
    kind = node_kind(node)
    written = None if place is None else place.node.value if isinstance(place.node, (ast.Assign, ast.AnnAssign)) else place.node
    if place is None or place.source is None:
        return []
    if isinstance(written, ast.AugAssign):
        sides: list[ast.expr] = [written.target, written.value]
    elif not isinstance(written, (ast.Call, ast.BinOp)) or not _is_op(written, kind, _ALIASES.get(kind, (kind.lower(),))):
        return []
    elif isinstance(written, ast.BinOp):
        sides = [written.left, written.right]
    else:
        library = isinstance(written.func, ast.Name) or dotted(written.func) is None or _of_torch(place.source, written.func)
        receiver = [written.func.value] if isinstance(written.func, ast.Attribute) and not library else []
        sides = [item for item in (*receiver, *written.args) if not isinstance(item, (ast.Constant, ast.UnaryOp, ast.Starred))]
        sides = sides[:1] if count == 1 else sides
    if len(sides) != count:
        return []
    return [text if len(text := place.source.flat(side)) <= 60 else f"{text[:57].rstrip()}..." for side in sides]


def _of_torch(source: Source, function: ast.expr) -> bool:
    """Whether a function is one of a module's (`torch.exp`), not a method of a tensor."""
    return isinstance(function, ast.Attribute) and (dotted(function.value) or "").partition(".")[0] in source.imports
