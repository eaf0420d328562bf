"""Follows a value backwards through the source to the places where it lost its path: what the trace would have recorded.

Used where there is no trace, and where none can be (numpy arrays and Python numbers carry no memory). Starts at the
backward call, goes through assignments, into the user's functions, methods and modules (found through the live frames),
and asks live objects what they are: a module with trainable parameters, a tensor that requires grad.
"""

from __future__ import annotations

import ast
from typing import Any

import torch
from torch import nn

from gradguard.analysis.history import cut_origins as _origins
from gradguard.analysis.history.called_functions import DEPTH, Calls
from gradguard.analysis.history.cut_origins import Origin
from gradguard.analysis.history.cutting_calls import is_metadata
from gradguard.analysis.history.flows import NOTHING, Flow, join, rebinds
from gradguard.analysis.history.grad_mode_switches import Switch, is_inference, turns_grad_off, turns_grad_on
from gradguard.analysis.incident import Incident
from gradguard.analysis.places.sites import site_at
from gradguard.analysis.places.source import ResolvedSite, function_def, resolve
from gradguard.analysis.program.bindings import dotted
from gradguard.analysis.program.index import program_of
from gradguard.analysis.program.search_scopes import Definition, Scope, definitions, evaluate
from gradguard.analysis.program.syntax import FUNCTIONS, load
from gradguard.core.safe_read import UNKNOWN, parameters_in

_BUDGET = 4_000


class Follower(Calls):
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
            return self.cut("nondiff", "compare", node, scope, inner)
        if isinstance(node, ast.Subscript):
            wanted = node.slice.value if isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, (int, str)) else None
            return self.flow(node.value, scope, wanted)
        if isinstance(node, (ast.Tuple, ast.List)):
            if (
                isinstance(pick, int)
                and -len(node.elts) <= pick < len(node.elts)
                and not any(isinstance(item, ast.Starred) for item in node.elts)
            ):
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
            return self.cut("nondiff", "not", node, scope, inner) if isinstance(node.op, ast.Not) else inner
        if isinstance(node, ast.BinOp):
            return join((self.flow(node.left, scope), self.flow(node.right, scope)))
        if isinstance(node, ast.BoolOp):
            return join(self.flow(value, scope) for value in node.values)
        return NOTHING

    def _name(self, node: ast.Name, scope: Scope, pick: int | str | None) -> Flow:
        value = (
            scope.env.get(node.id, scope.globals.get(node.id, UNKNOWN))
            if scope.view is not None or scope.depth == 0
            else scope.env.get(node.id, UNKNOWN)
        )
        if rebinds(scope, node):  # `x = x.detach()`: what the variable holds now is not what was read here
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
            return self.parameters(value)
        if isinstance(value, torch.Tensor) and value.requires_grad and not self._is_root(value):
            self.tensors[id(value)] = value
            return Flow((), True, frozenset((id(value),)) if value.is_leaf else frozenset())
        if isinstance(value, nn.Parameter):
            return NOTHING
        return None

    def _is_root(self, value: Any) -> bool:
        return any(value is root for root in self.incident.roots)

    def parameters(self, module: nn.Module) -> Flow:
        if not any(module is known for known in self.modules):
            self.modules.append(module)
        leaves = [p for p in parameters_in(module) if p.requires_grad]
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
                            position = next(
                                (i for i, part in enumerate(generator.target.elts) if isinstance(part, ast.Name) and part.id == node.id),
                                None,
                            )
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

    def _definition(self, definition: Definition, scope: Scope, pick: int | str | None) -> Flow:
        value = definition.value
        if definition.looped:
            flow = self._items(value, scope, definition.pick if isinstance(definition.pick, int) else None)
        else:
            flow = self.flow(value, scope, definition.pick if definition.pick is not None else pick)
        return self.under_blocks(flow, value, scope)

    def under_blocks(self, flow: Flow, node: ast.AST, scope: Scope) -> Flow:
        """The same value, computed inside the `with` blocks around it."""
        switch = self._block(node, scope)
        if switch is None or flow.attached is False or isinstance(node, (ast.Name, ast.Constant)):
            return flow
        kind = "inference" if is_inference(switch.text) else "no_grad"
        return self.cut(kind, kind, node, scope, flow, switch)

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
                        return Switch(
                            "with", site.span(), source.flat(item.context_expr), site.function if site.function != "<module>" else None
                        )
        return None

    def _outside(self, node: ast.Name, scope: Scope, pick: int | str | None) -> Flow:
        """A parameter of a live frame's function, a variable of an enclosing function, or a global."""
        if scope.view is not None and isinstance(scope.function, FUNCTIONS) and not isinstance(scope.function, ast.Lambda):
            argument = self.argument(node.id, scope)
            if argument is not None:
                caller, expression = argument
                return self.flow(expression, caller, pick)
        source = scope.source
        if isinstance(scope.function, FUNCTIONS):
            for above in (*source.ancestors(scope.function),):
                if isinstance(above, (*FUNCTIONS, ast.Module)):
                    level = next((view_scope.level for view_scope in self._live_scopes() if view_scope.function is above), None)
                    outer = self.live(level) if level is not None else Scope(source, above, {}, scope.globals, depth=scope.depth + 1)
                    if outer is None or scope.depth > DEPTH:
                        continue
                    ghost = ast.copy_location(ast.Name(id=node.id, ctx=ast.Load()), node)
                    ghost.lineno = 10**8
                    found = definitions(outer, node.id, ghost)
                    if found:
                        return join(self._definition(definition, outer, pick) for definition in reversed(found))
        return NOTHING

    def _live_scopes(self) -> list[Scope]:
        return [scope for level in range(min(len(self.views), 32)) if (scope := self.live(level)) is not None]

    def argument(self, name: str, scope: Scope) -> tuple[Scope, ast.expr] | None:
        """What a live function's caller passed for a parameter."""
        caller = self.live(scope.level + 1)
        if caller is None or caller.view is None or not isinstance(scope.function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            return None
        place, program = resolve(caller.view.site), program_of(caller.source)
        if place is None or place.call is None or program is None:
            return None
        given = program.given(place.call, scope.function, name)
        return None if given is None else (caller, given)

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
                return self.cut("data" if node.attr == "data" else "detach", node.attr, node, scope, self.flow(node.value, scope))
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
            if isinstance(method, (ast.FunctionDef, ast.AsyncFunctionDef)) and method is not scope.function and scope.depth < DEPTH:
                inner = Scope(
                    scope.source, method, {"self": scope.env["self"]} if "self" in scope.env else {}, scope.globals, depth=scope.depth + 1
                )
                ghost = ast.copy_location(ast.Name(id=name, ctx=ast.Load()), node)
                ghost.lineno = 10**8
                flows += [self._definition(definition, inner, pick) for definition in definitions(inner, name, ghost)]
        return join(flows) if flows else None

    # -- cuts ---------------------------------------------------------------------------------------------------------

    def cut(self, kind: str, func: str, node: ast.AST, scope: Scope, inner: Flow, switch: Switch | None = None, output: int = 0) -> Flow:
        """The value behind `node` loses its path here, if it had one."""
        if inner.attached is False:
            return inner if inner.found else NOTHING
        place = site_at(scope.source, node)
        origin = Origin(
            kind,
            func,
            place,
            switch,
            None,
            self._made(node, scope),
            [self.tensors[i] for i in inner.leaves if i in self.tensors],
            False,
            _origins.receiver_text(place),
            output=output,
            sure=inner.attached is True,
        )
        return Flow((*inner.found, origin), False, frozenset())

    def _made(self, node: ast.AST, scope: Scope) -> ResolvedSite | None:
        """Where the first variable in it that has a path got its value."""
        for name in ast.walk(node):
            if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Load) and self.flow(name, scope).attached:
                found = definitions(scope, name.id, name)
                if found and not found[0].looped:
                    return site_at(scope.source, found[0].value)
        return None
