"""A dropout (or batch norm) that eval() does not reach: made in forward, or kept in a plain list. Part of GG609."""

from __future__ import annotations

import ast

from torch import nn

from gradguard.analysis.incident import Incident
from gradguard.analysis.places.source import ResolvedSite, dotted, resolve
from gradguard.analysis.program.bindings import full_name
from gradguard.analysis.program.syntax import Source, range_of
from gradguard.core.diagnosis import Diagnosis, Fix, SourceSpan
from gradguard.core.safe_read import attributes, elements, modules_in
from gradguard.fixes.edits import replaced
from gradguard.monitors.train_modes import OutOfReach
from gradguard.rules.spans import attribute_set


def out_of_reach(incident: Incident, finding: OutOfReach, code: str, name: str) -> Diagnosis | None:
    """It has just acted as in training inside a trained module in eval mode, and is no part of that module."""
    root, part = finding.root(), finding.part()
    place = resolve(finding.site)
    if root is None or root.training or place is None:
        return None
    kind = finding.type_name
    whole = incident.names.of(root) or "self"
    if whole.partition(".")[0] == "self":
        whole = type(root).__name__
    made = _made_there(place, kind)
    held = None if made is not None or part is None else _held(root, part)
    ran = place.span(f"acts as in training while `{whole}` is in eval mode", "context")
    where = None if made is None else range_of(made)
    culprit: SourceSpan
    if made is not None and where is not None and place.source is not None:
        label = "a new module at each call, and a new module is in train mode"
        culprit = place.source.span(where, label, "culprit", place.source.qualname_around(made))
        headline = f"`{kind}` is made anew in each call and never in eval mode: `{whole}.eval()` does not reach it"
        why = (
            f"`eval()` sets the mode of the modules that `{whole}` holds. This one is made while `{whole}` runs, so it starts in train mode"
        )
        fix = Fix(title=f"Make the `{kind}` once, in `__init__`, as `self.{kind.lower()}`, and call that", safety="unsafe")
        fixes = [fix, *_in_place(place.source, made)]
        related = [] if culprit.line == ran.line else [ran]
    elif held is not None:
        module, attribute, container = held
        holder = type(module).__name__
        at = attribute_set(type(module), attribute)
        set_here = None if at is None else at.statement_span(f"a plain {container}: `{holder}` does not know what is in it", "culprit")
        culprit = set_here or ran.model_copy(update={"role": "culprit"})
        headline = f"`{attribute}` of `{holder}` is a plain {container}: `{whole}.eval()` does not reach the `{kind}` in it"
        why = f"`eval()` sets the mode of registered modules only. The `{kind}` is still in train mode"
        fixes = [Fix(title=f"Use `nn.{'ModuleDict' if container == 'dict' else 'ModuleList'}` for `self.{attribute}`", safety="unsafe")]
        related = [] if set_here is None else [ran]
    else:
        return None
    return Diagnosis(
        code=code,
        name=name,
        severity="warning",
        headline=headline,
        culprit=culprit,
        related=related,
        explanation=f"{why}: validation and prediction of `{whole}` {'are random' if 'Dropout' in kind else 'depend on the batch'}.",
        fixes=fixes,
    )


def _made_there(place: ResolvedSite, kind: str) -> ast.Call | None:
    """The construction, where the module is called on the spot or through a variable of the same function."""
    call = place.call
    if call is None or place.source is None:
        return None
    maker: ast.expr | None = call.func
    if isinstance(maker, ast.Name) and place.enclosing_function is not None:
        values = [
            node.value
            for node in ast.walk(place.enclosing_function)
            if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == maker.id for t in node.targets)
        ]
        maker = values[0] if len(values) == 1 else None
    written = dotted(maker.func) if isinstance(maker, ast.Call) else None
    made = written is not None and full_name(place.source, written).rpartition(".")[2] == kind
    return maker if made and isinstance(maker, ast.Call) else None


def _held(root: nn.Module, part: nn.Module) -> tuple[nn.Module, str, str] | None:
    """The attribute whose plain list or dict the part is in."""
    for module in modules_in(root):
        for key, value in attributes(module).items():
            if key in ("_parameters", "_buffers", "_modules") or not isinstance(value, (list, tuple, dict)):
                continue
            if any(item is part for item in elements(value, 512)):
                return module, key, type(value).__name__
    return None


def _in_place(source: Source, made: ast.Call) -> list[Fix]:
    """The mode handed on where the module is made: the smallest change, in methods of a module."""
    text = source.segment(made)
    method = next((above for above in source.ancestors(made) if isinstance(above, ast.FunctionDef)), None)
    if text is None or method is None or not method.args.args or method.args.args[0].arg != "self":
        return []
    patch = replaced(source, [(made, f"{text}.train(self.training)")])
    return [Fix(title="Hand the mode on: `.train(self.training)`", safety="unsafe", patch=patch)] if patch is not None else []
