"""Following a value into calls: the user's functions, methods and modules, and what libraries' functions do to a path."""

from __future__ import annotations

import ast
from collections.abc import Callable

import torch
from torch import nn

from gradguard.analysis.history import grad_mode_switches
from gradguard.analysis.history.cutting_calls import cut_by
from gradguard.analysis.history.flows import NOTHING, Flow, asks_for_grad, given_back, join
from gradguard.analysis.history.grad_mode_switches import Switch, decorator_of, is_inference
from gradguard.analysis.places.sites import site_at
from gradguard.analysis.places.source import ResolvedSite
from gradguard.analysis.program.bindings import dotted, full_name
from gradguard.analysis.program.search_scopes import Entry, Scope, entry_by_name, entry_of, evaluate
from gradguard.core.safe_read import UNKNOWN

DEPTH = 14  # calls entered one inside the other


class Calls:
    """The part of a `Follower` that enters calls."""

    modules: list[nn.Module]
    made: list[ResolvedSite]
    flow: Callable[..., Flow]

    def parameters(self, module: nn.Module) -> Flow:
        """What a module's own parameters contribute."""
        raise NotImplementedError

    def under_blocks(self, flow: Flow, node: ast.AST, scope: Scope) -> Flow:
        """A value, computed inside the `with` blocks around it."""
        raise NotImplementedError

    def cut(self, kind: str, func: str, node: ast.AST, scope: Scope, inner: Flow, switch: Switch | None = None, output: int = 0) -> Flow:
        """The value behind `node` loses its path here, if it had one."""
        raise NotImplementedError

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
        quiet = grad_mode_switches.graded_off(callee)
        if quiet is not None:  # a library's, such as `generate`
            given = [*self._arguments(node, scope), Flow((), True, frozenset()) if isinstance(quiet.bound, nn.Module) else NOTHING]
            place = site_at(scope.source, node)
            switch = Switch("library", place.span(), quiet.text, quiet.owner)
            return self.cut("inference" if is_inference(quiet.text) else "no_grad", "no_grad", node, scope, join(given), switch)
        receiver = NOTHING
        if isinstance(func, ast.Attribute) and not full.startswith(("torch.", "numpy.", "np.", "math.")):
            receiver = self.flow(func.value, scope)
        if isinstance(callee, nn.Module):
            return self._module(callee, join(self._arguments(node, scope)))
        arguments = self._arguments(node, scope)
        kind = cut_by(node, full, evaluate(func.value, scope) if isinstance(func, ast.Attribute) else UNKNOWN)
        inner = join((receiver, *arguments))
        if inner.attached is False and not inner.found and asks_for_grad(node):
            return Flow((), True, frozenset())
        if kind is not None:
            short = full.rpartition(".")[2] or (func.attr if isinstance(func, ast.Attribute) else full)
            if kind == "none" or (kind == "rewrap" and inner.attached is False and not inner.found):
                if full.startswith("torch.") and not short.endswith("_like"):
                    self.made.append(site_at(scope.source, node))
                return NOTHING
            if kind == "indices":
                return self.cut("nondiff", short, node, scope, inner, output=1) if pick in (1, "indices") else inner
            return self.cut(kind, short, node, scope, inner)
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
            scope = Scope(entry.source, entry.function, {"self": module}, entry.globals, depth=DEPTH // 2 + depth)
            names = [item.arg for item in entry.function.args.args][1:]
            scope.given.update({names[0]: inner} if names else {})
            return self._returns(entry, scope, None)
        return join((inner, self.parameters(module)))

    def _enter(self, entry: Entry, node: ast.Call, scope: Scope, pick: int | str | None) -> Flow:
        """Into a function of the user's: what it returns, given what it gets."""
        if scope.depth >= DEPTH:
            return Flow((), None)
        return self._returns(entry, self._inside(entry, node, scope), pick, scope, node)

    def returned(self, node: ast.Call, scope: Scope, pick: int | str | None) -> tuple[ast.expr, Scope] | None:
        """The one expression that a call of a function of the user's gives back, or the item of it, and the scope that it stands in."""
        callee = evaluate(node.func, scope)
        entry = entry_by_name(node.func, scope) if callee is UNKNOWN else entry_of(callee)
        given = [] if entry is None else [each for each in given_back(entry.function) if each is not None]
        if entry is None or isinstance(callee, type) or len(given) != 1 or scope.depth >= DEPTH:
            return None
        value = given[0]
        if pick is not None:
            if not isinstance(value, ast.Tuple) or not isinstance(pick, int) or not 0 <= pick < len(value.elts):
                return None
            if any(isinstance(each, ast.Starred) for each in value.elts):
                return None
            value = value.elts[pick]
        return value, self._inside(entry, node, scope)

    def _inside(self, entry: Entry, node: ast.Call, scope: Scope) -> Scope:
        """The scope of a function that a call has run, with what it was given."""
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
        return inner

    def _bind(self, inner: Scope, name: str, argument: ast.expr, flow: Flow, scope: Scope) -> None:
        inner.given[name] = flow
        value = evaluate(argument, scope)
        if value is not UNKNOWN and not isinstance(value, torch.Tensor):
            inner.env[name] = value

    def _returns(
        self, entry: Entry, inner: Scope, pick: int | str | None, scope: Scope | None = None, call: ast.Call | None = None
    ) -> Flow:
        flows = []
        for node in given_back(entry.function):
            if node is not None:
                flows.append(self.under_blocks(self.flow(node, inner, pick), node, inner))
        flow = join(flows)
        decorator = decorator_of(entry.source, entry.function)
        if decorator is not None and flow.attached is not False:
            place: ast.AST = next((item for item in given_back(entry.function) if item is not None), entry.function)
            flow = self.cut("inference" if is_inference(decorator.text) else "no_grad", "no_grad", place, inner, flow, decorator)
        if call is not None and scope is not None and flow.found:
            outer = site_at(scope.source, call)
            for origin in flow.found:
                if origin.outer is None and not origin.certain:
                    origin.outer = outer
        return flow
