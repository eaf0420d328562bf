"""A copy in eval mode that follows a trained network by its parameters only: its batch norms keep their first statistics. Part of GG609."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from gradguard.analysis.incident import Incident
from gradguard.analysis.live.names import as_code
from gradguard.analysis.places.source import ResolvedSite, dotted, resolve
from gradguard.analysis.program.expressions import inside
from gradguard.core.diagnosis import Diagnosis, Fix
from gradguard.core.safe_read import in_training, named_modules, parameters_in, store_of
from gradguard.fixes.at_places import own_statement
from gradguard.fixes.edits import indent_of, patched
from gradguard.instrumentation.journal import Journal
from gradguard.monitors.gradient_ledger import Ledger
from gradguard.monitors.initial_statistics import InitialStatistics, untouched
from gradguard.rules import wording
from gradguard.torch_compat.private_api import storage_key


def survey(incident: Incident, roots: list[tuple[str, nn.Module]]) -> None:
    """Has the calls of the next steps looked at where the parameters of such a batch norm have moved: with grad mode on, none is seen."""
    ledger = incident.notes[Ledger]
    found = [module for _, root in roots for _, module in named_modules(root) if ledger.modes.statistics.survey(module, ledger)]
    if found and not ledger.census_until:
        ledger.census_until = ledger.steps + 5


def unfollowed_statistics(incident: Incident, finding: InitialStatistics, code: str, name: str) -> Diagnosis | None:
    """It has just run, and the network that it follows has moved its own statistics since."""
    root, norm = finding.root(), finding.module()
    place = resolve(finding.site)
    if root is None or norm is None or place is None or in_training(norm):
        return None
    paths = [path for path, module in named_modules(root) if isinstance(module, _NormBase) and _initial(module)]
    leader = next(_leaders(incident, root, norm), None)
    if leader is None or not paths:
        return None
    ours, theirs = (wording.name_here(incident, each, finding.site) or _name(incident, each) for each in (root, leader))
    shown = ours or place.callee or type(root).__name__
    followed = theirs or f"the trained {type(leader).__name__}"
    norms = wording.listed([f"{shown}.{path}" if path else shown for path in paths], len(paths))
    written = _writer(incident.journal, norm)
    ran = "runs in eval mode, with the statistics that it was made with"
    updated = None if written is None else written.span(f"moves the parameters of `{shown}`; buffers are no parameters", "culprit")
    copied = f"for b, s in zip({as_code(ours)}.buffers(), {as_code(theirs)}.buffers()): b.copy_(s)" if ours and theirs else None
    how = f": `{copied}`" if copied else ""
    return Diagnosis(
        code=code,
        name=name,
        severity="warning",
        headline=f"`{shown}` follows `{followed}` by its parameters only: its batch norms still have their first running statistics"
        if theirs
        else f"`{shown}` follows {followed} by its parameters only: its batch norms still have their first running statistics",
        culprit=updated or place.span(ran, "culprit"),
        related=wording.spans(None if updated is None else place.span(ran, "context")),
        explanation=f"`running_mean` and `running_var` are buffers. Those of {norms} are still 0 and 1, and no forward in train mode has "
        f"moved them, while the parameters have been written and the statistics of {f'`{theirs}`' if theirs else followed} have moved. "
        f"In eval mode `{shown}` so normalises with nothing that the data has.",
        fixes=[
            Fix(
                title=f"Copy the buffers, too, where the parameters are updated{how}",
                safety="unsafe",
                patch=_patch(written),
            )
        ],
    )


def _name(incident: Incident, module: nn.Module) -> str | None:
    """A name outside of the module's own methods."""
    return next((name for name, value in incident.names.bindings if value is module and name.partition(".")[0] != "self"), None)


def _initial(module: nn.Module) -> bool:
    buffers = store_of(module, "_buffers")
    return untouched(module) and not bool(buffers["running_mean"].any()) and bool((buffers["running_var"] == 1).all())


def _leaders(incident: Incident, root: nn.Module, norm: nn.Module) -> Iterator[nn.Module]:
    """Networks of the same class and shapes that are trained, and whose own batch norm at that place has seen batches."""
    path = next(path for path, module in named_modules(root) if module is norm)
    trained, shapes = incident.notes[Ledger].trained_ids(), [p.shape for p in parameters_in(root)]
    for _, top in incident.names.modules:
        for _, module in named_modules(top):
            if type(module) is not type(root) or module is root:
                continue
            parameters = list(parameters_in(module))
            if [p.shape for p in parameters] != shapes or not any(id(p) in trained for p in parameters):
                continue
            twin = dict(named_modules(module)).get(path)
            count = store_of(twin, "_buffers").get("num_batches_tracked") if isinstance(twin, _NormBase) else None
            if isinstance(count, torch.Tensor) and bool(count) and not untouched(twin):
                yield module


def _writer(journal: Journal, norm: nn.Module) -> ResolvedSite | None:
    """Where the parameters of the batch norm were written last, as far as steps were traced."""
    for parameter in store_of(norm, "_parameters").values():
        key = storage_key(parameter)
        sites = [write.site for write in journal.writes_to(key) if write.site is not None] if key is not None else []
        if sites:
            return resolve(sites[-1])
    return None


def _patch(place: ResolvedSite | None) -> str | None:
    """The same loop over the buffers, after one over `zip(a.parameters(), b.parameters())`."""
    loop = next(iter(place.enclosing_loops), None) if place is not None else None
    if place is None or place.source is None or not isinstance(loop, ast.For) or loop.orelse or own_statement(place) is None:
        return None
    pair = loop.iter
    if (
        not isinstance(pair, ast.Call)
        or not isinstance(pair.func, ast.Name)
        or pair.func.id != "zip"
        or not isinstance(loop.target, ast.Tuple)
    ):
        return None
    owners = [dotted(each.func.value) for each in pair.args if _is_parameters(each) and isinstance(each.func, ast.Attribute)]  # type: ignore[attr-defined]
    names = [each.id for each in loop.target.elts if isinstance(each, ast.Name)]
    receiver = (place.receiver or "").partition(".")[0]
    if len(owners) != 2 or len(names) != 2 or len(pair.args) != 2 or pair.keywords or receiver not in names or None in owners:
        return None
    source, mine = place.source, names.index(receiver)
    if any(True for _ in inside(loop, ast.Break, ast.Continue)) or loop.body[0].lineno == loop.lineno:
        return None
    indent, end = indent_of(source, loop.lineno), loop.end_lineno or loop.lineno
    lines = (
        f"{indent}for buffer, source in zip({owners[mine]}.buffers(), {owners[1 - mine]}.buffers()):",
        f"{indent}    buffer.copy_(source)",
    )
    return patched(source, insert=[(end, line) for line in lines])


def _is_parameters(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "parameters" and not node.args
