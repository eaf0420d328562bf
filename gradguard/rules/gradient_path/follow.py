"""Follows a value backwards through the source to the places where it lost its path: what the trace would have recorded.

Used where there is no trace, and where none can be (numpy arrays and Python numbers carry no memory). Starts at the
backward call, goes through assignments, into the user's functions, methods and modules (found through the live frames),
and asks live objects what they are: a module with trainable parameters, a tensor that requires grad.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from gradguard.evidence.bindings import dotted, full_name, targets_of
from gradguard.evidence.frames import FrameView
from gradguard.evidence.source import ResolvedSite, function_def, resolve
from gradguard.evidence.syntax import FUNCTIONS, load
from gradguard.rules.gradient_path import origins as _origins
from gradguard.rules.gradient_path.cutting import cut_by, is_metadata
from gradguard.rules.gradient_path.origins import Origin
from gradguard.rules.gradient_path.places import site_at
from gradguard.rules.gradient_path.scopes import UNKNOWN, Entry, Scope, attribute, definitions, entry_by_name, entry_of, evaluate
from gradguard.rules.gradient_path.switches import Switch, decorator_of, is_inference, turns_grad_off, turns_grad_on
from gradguard.rules.incident import Incident

_BUDGET = 4_000
_DEPTH = 14


class Flow(NamedTuple):
    """What is known of an expression's value: where it lost paths, whether it (still) has one, from which leaves."""

    found: tuple[Origin, ...] = ()
    attached: bool | None = False
    leaves: frozenset[int] = frozenset()


NOTHING = Flow()


def join(flows: Iterable[Flow]) -> Flow:
    """Values that go into one result."""
    found: list[Origin] = []
    attached: bool | None = False
    leaves: frozenset[int] = frozenset()
    for flow in flows:
        found += flow.found
        leaves |= flow.leaves
        attached = True if flow.attached or attached else None if flow.attached is None or attached is None else False
    return Flow(tuple(found), attached, leaves)


class Follower:
    """One search."""

    def __init__(self, incident: Incident) -> None:
        self.incident = incident
        self.views = incident.user_frames
        self.left = _BUDGET
        self.tensors: dict[int, torch.Tensor] = {}
        self._open: set[tuple[int, int, Any]] = set()
        self._done: dict[tuple[int, int, Any], Flow] = {}
        self._scopes: dict[int, Scope] = {}
        self.modules: list[nn.Module] = []
        """The modules that the value went through, in the order met."""
        self.made: list[ResolvedSite] = []
        """Where plain tensors it was computed from were made."""

    # -- scopes -------------------------------------------------------------------------------------------------------

    def live(self, level: int) -> Scope | None:
        """The scope of a live frame."""
        if level in self._scopes:
            return self._scopes[level]
        if level >= len(self.views):
            return None
        view = self.views[level]
        code = view.frame.f_code
        source = load(code.co_filename)
        if source is None or source.tree is None:
            return None
        function = source.tree if code.co_name == "<module>" else function_def(code)
        if function is None:
            return None
        scope = self._scopes[level] = Scope(source, function, view.locals, view.globals, view, level)
        return scope

    # -- expressions --------------------------------------------------------------------------------------------------

    def flow(self, node: ast.AST | None, scope: Scope, pick: int | str | None = None) -> Flow:
        """Where the value of an expression comes from."""
        if node is None or self.left <= 0:
            return Flow((), None)
        self.left -= 1
        key = (id(node), id(scope), pick)
        if key in self._done:
            return self._done[key]
        if key in self._open:
            return NOTHING
        self._open.add(key)
        result = self._flow(node, scope, pick)
        self._open.discard(key)
        self._done[key] = result
        return result

    def _flow(self, node: ast.AST, scope: Scope, pick: int | str | None) -> Flow:
        if isinstance(node, (ast.Constant, ast.JoinedStr, ast.Lambda)):
            return NOTHING
        if isinstance(node, ast.Name):
            return self._name(node, scope, pick)
        if isinstance(node, ast.Attribute):
            return self._attribute(node, scope, pick)
        if isinstance(node, ast.Call):
            return self._call(node, scope, pick)
        if isinstance(node, ast.Compare):
            inner = join(self.flow(part, scope) for part in (node.left, *node.comparators))
            if all(isinstance(op, (ast.Is, ast.IsNot, ast.In, ast.NotIn)) for op in node.ops):
                return NOTHING
            return self._cut("nondiff", "compare", node, scope, inner)
        if isinstance(node, ast.Subscript):
            wanted = node.slice.value if isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, (int, str)) else None
            return self.flow(node.value, scope, wanted)
        if isinstance(node, (ast.Tuple, ast.List)):
            if isinstance(pick, int) and -len(node.elts) <= pick < len(node.elts) and not any(isinstance(item, ast.Starred) for item in node.elts):
                return self.flow(node.elts[pick], scope)
            return join(self.flow(item, scope) for item in node.elts)
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and pick is not None and key.value == pick:
                    return self.flow(value, scope)
            return join(self.flow(value, scope) for value in node.values)
        if isinstance(node, (ast.ListComp, ast.SetComp, ast.GeneratorExp)):
            return self.flow(node.elt, scope, pick if isinstance(pick, str) else None)
        if isinstance(node, ast.DictComp):
            return self.flow(node.value, scope)
        if isinstance(node, ast.IfExp):
            return join((self.flow(node.body, scope, pick), self.flow(node.orelse, scope, pick)))
        if isinstance(node, (ast.NamedExpr, ast.Starred, ast.Await)):
            return self.flow(node.value, scope, pick)
        if isinstance(node, (ast.Yield, ast.YieldFrom)):
            return self.flow(node.value, scope, pick)
        if isinstance(node, ast.UnaryOp):
            inner = self.flow(node.operand, scope)
            return self._cut("nondiff", "not", node, scope, inner) if isinstance(node.op, ast.Not) else inner
        if isinstance(node, ast.BinOp):
            inner = join((self.flow(node.left, scope), self.flow(node.right, scope)))
            return inner
        if isinstance(node, ast.BoolOp):
            return join(self.flow(value, scope) for value in node.values)
        return NOTHING

    def _name(self, node: ast.Name, scope: Scope, pick: int | str | None) -> Flow:
        value = scope.env.get(node.id, scope.globals.get(node.id, UNKNOWN)) if scope.view is not None or scope.depth == 0 else scope.env.get(node.id, UNKNOWN)
        if _rebinds(scope, node):  # `x = x.detach()`: what the variable holds now is not what was read here
            value = UNKNOWN
        known = self._object(value, pick)
        if known is not None:
            return known
        comprehended = self._comprehension(node, scope)
        if comprehended is not None:
            return comprehended
        found = definitions(scope, node.id, node)
        if found:
            flows = [self._definition(definition, scope, pick) for definition in found]
            if any(isinstance(definition.statement, ast.AugAssign) for definition in found) and node.id in scope.given:
                flows.append(scope.given[node.id])
            return self._clamped(join(reversed(flows)), value)
        if node.id in scope.given:
            given: Flow = scope.given[node.id]
            return given
        return self._clamped(self._outside(node, scope, pick), value)

    def _clamped(self, flow: Flow, value: Any) -> Flow:
        """A live gradless tensor has no path, whatever the source seems to say."""
        if isinstance(value, torch.Tensor) and not value.requires_grad:
            return Flow(flow.found, None if flow.attached else flow.attached, flow.leaves)
        return flow

    def _object(self, value: Any, pick: int | str | None) -> Flow | None:
        """A live object that has a path, or cannot have lost one; None where its making must be looked at."""
        if isinstance(value, nn.Module):
            return self._parameters(value)
        if isinstance(value, torch.Tensor) and value.requires_grad and not self._is_root(value):
            self.tensors[id(value)] = value
            return Flow((), True, frozenset((id(value),)) if value.is_leaf else frozenset())
        if isinstance(value, nn.Parameter):
            return NOTHING
        return None

    def _is_root(self, value: Any) -> bool:
        return any(value is root for root in self.incident.roots)

    def _parameters(self, module: nn.Module) -> Flow:
        if not any(module is known for known in self.modules):
            self.modules.append(module)
        leaves = [p for p in module.parameters() if p.requires_grad]
        self.tensors.update((id(p), p) for p in leaves)
        return Flow((), bool(leaves), frozenset(id(p) for p in leaves))

    def _comprehension(self, node: ast.Name, scope: Scope) -> Flow | None:
        """A comprehension's own variable."""
        for above in scope.source.ancestors(node):
            if isinstance(above, FUNCTIONS):
                return None
            if isinstance(above, (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)):
                for generator in above.generators:
                    if any(isinstance(item, ast.Name) and item.id == node.id for item in ast.walk(generator.target)):
                        if any(item is node for item in ast.walk(generator.iter)):
                            continue
                        position = None
                        if isinstance(generator.target, (ast.Tuple, ast.List)):
                            position = next((i for i, part in enumerate(generator.target.elts) if isinstance(part, ast.Name) and part.id == node.id), None)
                        return self._items(generator.iter, scope, position)
        return None

    def _items(self, node: ast.expr, scope: Scope, position: int | None) -> Flow:
        """What iterating gives: through zip, enumerate, reversed, and generators of the user's."""
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id == "zip" and position is not None and position < len(node.args):
                return self.flow(node.args[position], scope)
            if node.func.id == "enumerate" and node.args:
                return NOTHING if position == 0 else self._items(node.args[0], scope, None)
            if node.func.id in ("range", "len"):
                return NOTHING
        return self.flow(node, scope, position)

    def _definition(self, definition: Any, scope: Scope, pick: int | str | None) -> Flow:
        value = definition.value
        if definition.looped:
            flow = self._items(value, scope, definition.pick)
        else:
            flow = self.flow(value, scope, definition.pick if definition.pick is not None else pick)
        return self._under_blocks(flow, value, scope)

    def _under_blocks(self, flow: Flow, node: ast.AST, scope: Scope) -> Flow:
        """The same value, computed inside the `with` blocks around it."""
        switch = self._block(node, scope)
        if switch is None or flow.attached is False or isinstance(node, (ast.Name, ast.Constant)):
            return flow
        kind = "inference" if is_inference(switch.text) else "no_grad"
        return self._cut(kind, kind, node, scope, flow, switch)

    def _block(self, node: ast.AST, scope: Scope) -> Switch | None:
        source = scope.source
        for above in source.ancestors(node):
            if isinstance(above, FUNCTIONS):
                return None
            if isinstance(above, (ast.With, ast.AsyncWith)):
                for item in reversed(above.items):
                    if turns_grad_on(item.context_expr):
                        return None
                    if turns_grad_off(item.context_expr):
                        site = site_at(source, item.context_expr)
                        return Switch("with", site.span(), source.flat(item.context_expr), site.function if site.function != "<module>" else None)
        return None

    def _outside(self, node: ast.Name, scope: Scope, pick: int | str | None) -> Flow:
        """A parameter of a live frame's function, a variable of an enclosing function, or a global."""
        if scope.view is not None and isinstance(scope.function, FUNCTIONS) and not isinstance(scope.function, ast.Lambda):
            argument = self._argument(node.id, scope)
            if argument is not None:
                caller, expression = argument
                return self.flow(expression, caller, pick)
        source = scope.source
        if isinstance(scope.function, FUNCTIONS):
            for above in (*source.ancestors(scope.function),):
                if isinstance(above, (*FUNCTIONS, ast.Module)):
                    level = next((view_scope.level for view_scope in self._live_scopes() if view_scope.function is above), None)
                    outer = self.live(level) if level is not None else Scope(source, above, {}, scope.globals, depth=scope.depth + 1)
                    if outer is None or scope.depth > _DEPTH:
                        continue
                    ghost = ast.copy_location(ast.Name(id=node.id, ctx=ast.Load()), node)
                    ghost.lineno = 10**8
                    found = definitions(outer, node.id, ghost)
                    if found:
                        return join(self._definition(definition, outer, pick) for definition in reversed(found))
        return NOTHING

    def _live_scopes(self) -> list[Scope]:
        return [scope for level in range(min(len(self.views), 32)) if (scope := self.live(level)) is not None]

    def _argument(self, name: str, scope: Scope) -> tuple[Scope, ast.expr] | None:
        """What a live function's caller passed for a parameter."""
        caller = self.live(scope.level + 1)
        if caller is None or caller.view is None or not isinstance(scope.function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return None
        place = resolve(caller.view.site)
        call = place.call if place is not None else None
        if call is None:
            return None
        arguments = scope.function.args
        names = [item.arg for item in (*arguments.posonlyargs, *arguments.args)]
        if names and names[0] in ("self", "cls") and isinstance(call.func, ast.Attribute):
            names = names[1:]
        elif names and names[0] == "self":
            names = names[1:]
        for keyword in call.keywords:
            if keyword.arg == name:
                return caller, keyword.value
        if name in names and names.index(name) < len(call.args) and not any(isinstance(item, ast.Starred) for item in call.args):
            return caller, call.args[names.index(name)]
        return None

    def _attribute(self, node: ast.Attribute, scope: Scope, pick: int | str | None) -> Flow:
        if is_metadata(node.attr):
            return NOTHING
        value = evaluate(node, scope)
        known = self._object(value, pick) if value is not UNKNOWN else None
        if known is not None:
            return known
        if node.attr in ("data", "grad"):
            base = evaluate(node.value, scope)
            if base is UNKNOWN or isinstance(base, torch.Tensor):
                return self._cut("data" if node.attr == "data" else "detach", node.attr, node, scope, self.flow(node.value, scope))
        name = dotted(node)
        if name is not None and (value is not UNKNOWN or name.startswith("self.")):
            flow = self._stored(node, name, scope, pick)
            if flow is not None:
                return self._clamped(flow, value)
        return self.flow(node.value, scope, node.attr if not name or not name.startswith("self.") else None)

    def _stored(self, node: ast.Attribute, name: str, scope: Scope, pick: int | str | None) -> Flow | None:
        """`self.memory`: what the methods of its class (or this function) assign to it."""
        local = definitions(scope, name, node)
        if local:
            return join(self._definition(definition, scope, pick) for definition in local)
        if not name.startswith("self.") or not isinstance(scope.function, FUNCTIONS):
            return None
        cls = next((above for above in scope.source.ancestors(scope.function) if isinstance(above, ast.ClassDef)), None)
        flows = []
        for method in cls.body if cls is not None else ():
            if isinstance(method, (ast.FunctionDef, ast.AsyncFunctionDef)) and method is not scope.function and scope.depth < _DEPTH:
                inner = Scope(scope.source, method, {"self": scope.env["self"]} if "self" in scope.env else {}, scope.globals, depth=scope.depth + 1)
                ghost = ast.copy_location(ast.Name(id=name, ctx=ast.Load()), node)
                ghost.lineno = 10**8
                flows += [self._definition(definition, inner, pick) for definition in definitions(inner, name, ghost)]
        return join(flows) if flows else None

    # -- calls --------------------------------------------------------------------------------------------------------

    def _call(self, node: ast.Call, scope: Scope, pick: int | str | None) -> Flow:
        func = node.func
        callee = evaluate(func, scope)
        name = dotted(func)
        full = full_name(scope.source, name) if name else (func.attr if isinstance(func, ast.Attribute) else "")
        entry = entry_of(callee) if callee is not UNKNOWN else None
        if entry is None and (callee is UNKNOWN):
            entry = entry_by_name(func, scope)
        if isinstance(callee, nn.Module) and not any(callee is known for known in self.modules):
            self.modules.append(callee)
        if entry is not None and not isinstance(callee, type):
            return self._enter(entry, node, scope, pick)
        receiver = NOTHING
        if isinstance(func, ast.Attribute) and not full.startswith(("torch.", "numpy.", "np.", "math.")):
            receiver = self.flow(func.value, scope)
        if isinstance(callee, nn.Module):
            return self._module(callee, join(self._arguments(node, scope)))
        arguments = self._arguments(node, scope)
        kind = cut_by(node, full, evaluate(func.value, scope) if isinstance(func, ast.Attribute) else UNKNOWN)
        inner = join((receiver, *arguments))
        if inner.attached is False and not inner.found and _asks_for_grad(node):
            return Flow((), True, frozenset())
        if kind is not None:
            short = full.rpartition(".")[2] or (func.attr if isinstance(func, ast.Attribute) else full)
            if kind == "none" or (kind == "rewrap" and inner.attached is False and not inner.found):
                if full.startswith("torch.") and not short.endswith("_like"):
                    self.made.append(site_at(scope.source, node))
                return NOTHING
            if kind == "indices":
                return self._cut("nondiff", short, node, scope, inner) if pick in (1, "indices") else inner
            return self._cut(kind, short, node, scope, inner)
        return inner

    def _arguments(self, node: ast.Call, scope: Scope) -> list[Flow]:
        return [self.flow(argument, scope) for argument in (*node.args, *(keyword.value for keyword in node.keywords))]

    def _module(self, module: nn.Module, inner: Flow, depth: int = 0) -> Flow:
        """A module of torch's own; containers are looked into for modules of the user's."""
        if isinstance(module, nn.Sequential) and depth < 6:
            for child in module._modules.values():
                if child is not None:
                    inner = self._module(child, inner, depth + 1)
            return inner
        entry = entry_of(module)
        if entry is not None and depth:
            scope = Scope(entry.source, entry.function, {"self": module}, entry.globals, depth=_DEPTH // 2 + depth)
            names = [item.arg for item in entry.function.args.args][1:]
            scope.given.update({names[0]: inner} if names else {})
            return self._returns(entry, scope, None)
        return join((inner, self._parameters(module)))

    def _enter(self, entry: Entry, node: ast.Call, scope: Scope, pick: int | str | None) -> Flow:
        """Into a function of the user's: what it returns, given what it gets."""
        if scope.depth >= _DEPTH:
            return Flow((), None)
        inner = Scope(entry.source, entry.function, {}, entry.globals, depth=scope.depth + 1)
        arguments = entry.function.args
        names = [item.arg for item in (*arguments.posonlyargs, *arguments.args)]
        if entry.bound is not UNKNOWN and names:
            inner.env[names.pop(0)] = entry.bound
        elif names and names[0] == "self" and isinstance(node.func, ast.Attribute):
            names.pop(0)
        defaults = dict(zip(reversed(names), reversed(arguments.defaults), strict=False))
        flows: list[Flow] = []
        for i, argument in enumerate(node.args):
            flow = self.flow(argument, scope)
            flows.append(flow)
            if i < len(names) and not isinstance(argument, ast.Starred):
                self._bind(inner, names[i], argument, flow, scope)
        for keyword in node.keywords:
            flow = self.flow(keyword.value, scope)
            flows.append(flow)
            if keyword.arg is not None:
                self._bind(inner, keyword.arg, keyword.value, flow, scope)
        for name, default in defaults.items():
            if name not in inner.given and isinstance(default, ast.Constant):
                inner.given[name] = NOTHING
        if arguments.vararg is not None:
            inner.given[arguments.vararg.arg] = join(flows)
        if arguments.kwarg is not None:
            inner.given[arguments.kwarg.arg] = join(flows)
        for name in names:
            inner.given.setdefault(name, NOTHING if not any(isinstance(item, ast.Starred) for item in node.args) else join(flows))
        return self._returns(entry, inner, pick, scope, node)

    def _bind(self, inner: Scope, name: str, argument: ast.expr, flow: Flow, scope: Scope) -> None:
        inner.given[name] = flow
        value = evaluate(argument, scope)
        if value is not UNKNOWN and not isinstance(value, torch.Tensor):
            inner.env[name] = value

    def _returns(self, entry: Entry, inner: Scope, pick: int | str | None, scope: Scope | None = None, call: ast.Call | None = None) -> Flow:
        flows = []
        for node in given_back(entry.function):
            if node is not None:
                flows.append(self._under_blocks(self.flow(node, inner, pick), node, inner))
        flow = join(flows)
        decorator = decorator_of(entry.source, entry.function)
        if decorator is not None and flow.attached is not False:
            node = next((item for item in given_back(entry.function) if item is not None), entry.function)
            flow = self._cut("inference" if is_inference(decorator.text) else "no_grad", "no_grad", node, inner, flow, decorator)
        if call is not None and scope is not None and flow.found:
            outer = site_at(scope.source, call)
            for origin in flow.found:
                if origin.outer is None and not origin.certain:
                    origin.outer = outer
        return flow

    # -- cuts ---------------------------------------------------------------------------------------------------------

    def _cut(self, kind: str, func: str, node: ast.AST, scope: Scope, inner: Flow, switch: Switch | None = None) -> Flow:
        """The value behind `node` loses its path here, if it had one."""
        if inner.attached is False:
            return inner if inner.found else NOTHING
        place = site_at(scope.source, node)
        origin = Origin(kind, func, place, switch, None, None, [self.tensors[i] for i in inner.leaves if i in self.tensors], False,
                        _origins.receiver_text(place), inner.attached is True)
        return Flow((*inner.found, origin), False, frozenset())


def _rebinds(scope: Scope, node: ast.Name) -> bool:
    statement = scope.source.statement(node)
    return isinstance(statement, (ast.Assign, ast.AnnAssign)) and any(
        isinstance(target, ast.Name) and target.id == node.id for target in targets_of(statement)
    )


def _asks_for_grad(node: ast.Call) -> bool:
    """`torch.rand(3, requires_grad=True)`, `x.requires_grad_()`."""
    if any(keyword.arg == "requires_grad" and isinstance(keyword.value, ast.Constant) and keyword.value.value is True for keyword in node.keywords):
        return True
    called = node.func.attr if isinstance(node.func, ast.Attribute) else ""
    return called == "requires_grad_" and not (node.args and isinstance(node.args[0], ast.Constant) and node.args[0].value is False)


def given_back(function: ast.AST) -> list[ast.expr | None]:
    """The expressions a function returns or yields, inner functions left out."""
    if isinstance(function, ast.Lambda):
        return [function.body]
    found: list[ast.expr | None] = []

    def walk(node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (*FUNCTIONS, ast.ClassDef)):
                continue
            if isinstance(child, (ast.Return, ast.Yield, ast.YieldFrom)):
                found.append(child.value)
            walk(child)

    walk(function)
    return found


# -- what rules ask ---------------------------------------------------------------------------------------------------------


def is_method(call: ast.Call) -> bool:
    """`loss.backward(...)`, not `torch.autograd.backward(loss)` or `accelerator.backward(loss)`."""
    name = dotted(call.func)
    return isinstance(call.func, ast.Attribute) and (name is None or name.rpartition(".")[0] not in ("torch.autograd", "autograd", "accelerator", "fabric", "self"))


def root_expression(place: ResolvedSite, value: Any = UNKNOWN) -> ast.expr | None:
    """What backward is called on, as an expression of the call's line."""
    call = place.call
    if call is None:
        return None
    full = place.callee_full_name or ""
    if full.startswith("torch.autograd") or full in ("grad", "backward"):
        given = [keyword.value for keyword in call.keywords if keyword.arg in ("outputs", "tensors")]
        return call.args[0] if call.args else given[0] if given else None
    if isinstance(call.func, ast.Attribute) and call.func.attr == "backward" and not call.args:
        base = call.func.value
        # scaler.scale(loss).backward()
        if isinstance(base, ast.Call) and isinstance(base.func, ast.Attribute) and base.func.attr in ("scale", "scale_loss") and base.args:
            return base.args[0]
        return base
    if isinstance(call.func, ast.Attribute) and call.args and call.func.attr in ("backward", "manual_backward", "scale", "step", "grad"):
        name = dotted(call.func.value)
        return call.func.value if name and "loss" in name else call.args[0]
    return call.args[0] if call.args else None


def flow_of_root(incident: Incident) -> tuple[Follower, Flow] | None:
    """Follows what backward was called on."""
    follower = Follower(incident)
    place = incident.place
    scope = follower.live(0)
    if place is None or scope is None:
        return None
    expression = root_expression(place)
    if expression is None:
        return None
    flow = follower.flow(expression, scope)
    return follower, follower._under_blocks(flow, expression, scope)


def origins_of_root(incident: Incident, leaf: bool = False) -> list[Origin]:
    """The places where the source cuts the root's path, likeliest first."""
    followed = flow_of_root(incident)
    if followed is None:
        return []
    found = _origins.merged(followed[1].found)
    sure = [origin for origin in found if origin.sure]
    chosen = sure or ([] if leaf else found)
    return _origins.ranked(incident, chosen)


def refined(incident: Incident, recorded: Sequence[Origin]) -> list[Origin]:
    """Several recorded origins: those that the source leads to with trainable parameters behind them come first."""
    if len(recorded) < 2:
        return list(recorded)
    followed = flow_of_root(incident)
    if followed is None:
        return list(recorded)
    trained = _origins.trained_ids(incident)
    known = {origin.key: origin for origin in followed[1].found}
    for origin in recorded:
        match = known.get(origin.key)
        if match is not None and not origin.leaves:
            origin.leaves += match.leaves
    return sorted(recorded, key=lambda origin: bool(origin.leaves) and bool(trained) and not any(id(leaf) in trained for leaf in origin.leaves))


def toggle_in_source(incident: Incident) -> ResolvedSite | None:
    """`loss.requires_grad_(True)`, `loss.requires_grad = True` or `requires_grad=True` in the function that calls backward."""
    follower = Follower(incident)
    scope = follower.live(0)
    place = incident.place
    expression = root_expression(place) if place is not None else None
    name = dotted(expression) if expression is not None else None
    if scope is None or name is None:
        return None
    for node in ast.walk(scope.function):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "requires_grad_" and dotted(node.func.value) == name:
            return site_at(scope.source, node)
        if isinstance(node, ast.Assign) and any(dotted(target) == f"{name}.requires_grad" for target in node.targets):
            return site_at(scope.source, node)
    return None


__all__ = ["Flow", "Follower", "attribute", "flow_of_root", "origins_of_root", "refined", "root_expression", "toggle_in_source"]
_ = FrameView
