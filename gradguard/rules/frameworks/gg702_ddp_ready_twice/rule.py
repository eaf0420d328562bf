"""# GG702 ddp-ready-twice

## What it is
A parameter of a DistributedDataParallel module reports its gradient twice in one step.

## Why it is wrong
DDP expects one report a parameter and step. Reentrant checkpointing runs a backward inside backward, once for each
checkpointed block, so that a parameter used in two of them reports twice; a parameter used outside of forward reports after
DDP had noted it as unused. With `find_unused_parameters=True` all are noted as unused where forward returns an object in which
DDP finds no tensor.

## Example
    def forward(self, x):
        for _ in range(2):
            x = checkpoint(self.block, x, use_reentrant=True)     # the same block, twice
        return x

## Use instead
    x = checkpoint(self.block, x, use_reentrant=False)

## Fix safety
Safe: without reentrance the gradients are the same.

## When it speaks, what silences it
When PyTorch raises.
"""

from __future__ import annotations

import ast
import sys
from types import FrameType
from typing import Any

import torch.utils.checkpoint
from torch import nn

from gradguard.analysis.incident import Incident
from gradguard.analysis.live.names import short_list
from gradguard.analysis.places import skips
from gradguard.analysis.places.source import module_ast, parent_of, span_of
from gradguard.analysis.program.expressions import argument, inside, is_constant
from gradguard.analysis.program.index import calls_in
from gradguard.analysis.program.syntax import FUNCTIONS
from gradguard.analysis.program.user_calls import user_files
from gradguard.analysis.program.user_files import sources_of
from gradguard.core.diagnosis import Diagnosis, Fix, SourceSpan
from gradguard.core.safe_read import modules_in, named_parameters, parameters_in
from gradguard.rules.base import Rule
from gradguard.rules.frameworks import ddp as shared
from gradguard.rules.frameworks.gg702_ddp_ready_twice import ddp_outputs

CODE, NAME = "GG702", "ddp-ready-twice"
_CHECKPOINTS = ("checkpoint", "checkpoint_sequential")


def recognise(incident: Incident) -> Diagnosis | None:
    """Which parameter, and what makes it report twice."""
    ddp = shared.replica(incident)
    if ddp is None:
        return None
    twice = shared.at_indices(incident, ddp)
    what = short_list(twice, 2) or "a parameter"
    name = shared.name_of(incident, ddp)
    made = shared.made(incident, ddp, "expects one report a parameter and step")
    found = _checkpointed(incident, ddp, twice)
    outside = [] if found else _outside(incident, ddp)
    hides = None if found or outside else ddp_outputs.hidden(incident, ddp)
    culprit: SourceSpan | None = None
    if hides is not None:
        culprit = hides.returned or (None if made is None else made.model_copy(update={"role": "culprit"}))
        headline = f"{what} reports its gradient after DDP has noted it as unused: forward returns a `{hides.kind}`, in which "
        headline += "`find_unused_parameters=True` finds no tensor"
        why = "With `find_unused_parameters=True` it walks the graphs of the tensors that forward returns, in lists, tuples, dicts and "
        why += f"dataclasses; `{hides.name}` is a plain `{hides.kind}`, so each parameter counts as unused and ready, and reports again."
        fixes = [
            Fix(title=f"Return a dict, a tuple or a dataclass in place of `{hides.kind}`", safety="manual"),
            Fix(title="Leave `find_unused_parameters=True` out, if every parameter takes part in each step", safety="manual"),
        ]
    elif found:
        culprit = span_of(*found[0], label="runs a backward of its own inside backward", role="culprit") if len(found) == 1 else None
        headline = f"{what} reports its gradient twice in one step: "
        headline += "reentrant checkpointing (`use_reentrant=True`) runs its block more than once"
        why = "Each reentrant checkpoint runs a backward of its own, and a parameter that several of them use reports once in each."
        fixes = [
            Fix(title="Pass `use_reentrant=False` to `checkpoint`", safety="safe"),
            Fix(title="Make the DDP module with `static_graph=True`, if each step uses the same layers", safety="manual"),
        ]
    elif outside:
        file, node, path = outside[0]
        culprit = span_of(file, node, label=f"uses `{path}` past `{name}`'s forward", role="culprit") if len(outside) == 1 else None
        headline = f"{what} reports its gradient twice in one step: `{path}` is used outside of `{name}`'s forward"
        why = "After forward DDP notes what the output does not depend on as ready; "
        why += "a use of a parameter outside of forward reports it once more."
        fixes = [Fix(title=f"Compute what needs `{path}` inside of forward, and return it", safety="manual")]
    else:
        shared_by = _shared(ddp.module, twice)
        culprit = None if made is None else made.model_copy(update={"role": "culprit"})
        together = f": {short_list(shared_by)} are one parameter" if len(shared_by) > 1 else ""
        headline = f"{what} reports its gradient twice in one step{together}"
        why = "It may be used in two forwards before one backward, or by two modules that share it, or run backward twice after one "
        why += "forward."
        fixes = [Fix(title="Run one forward of the DDP module for each backward, on all inputs at once", safety="manual")]
        if getattr(ddp, "find_unused_parameters", False):
            fixes.append(Fix(title="Leave `find_unused_parameters=True` out, if every parameter takes part in each step", safety="manual"))
    return Diagnosis(
        code=CODE,
        name=NAME,
        headline=headline,
        culprit=culprit,
        related=[made] if made is not None and culprit is not None and made.line != culprit.line else [],
        tensors=shared.facts(ddp, twice),
        explanation=f"DDP averages a parameter's gradient over the ranks when it is reported, and expects one report a step. {why}",
        fixes=fixes,
        avoid=["`find_unused_parameters=True`: it does not help here, and brings the same error on with reentrant checkpointing"],
    )


def _checkpointed(incident: Incident, ddp: Any, twice: list[str]) -> list[tuple[str, ast.Call]]:
    """Reentrant checkpoint calls of the user's, those that run what holds the parameter first."""
    found: list[tuple[str, ast.Call]] = []
    files = dict.fromkeys([*user_files(incident), *(use.file for name in twice for use in shared.uses(ddp.module, name))])
    for source, call in calls_in(sources_of(files), *_CHECKPOINTS):
        if len(call.args) > 1 and not is_constant(argument(call, "use_reentrant"), False):
            found.append((source.filename, call))
    parts = {part for name in twice for part in name.split(".")}
    nearer = [(file, node) for file, node in found if parts & {n.attr for n in inside(node.args[0], ast.Attribute)}]
    return nearer or (found if _reentrant(incident.error) else [])


def _reentrant(error: BaseException | None) -> bool:
    """Whether the exception comes from a backward that a checkpoint runs inside of backward.

    It is caught around the inner of the two calls: then the checkpoint's frame is not in the traceback yet, but among the callers.
    """
    tb = None if error is None else error.__traceback__
    while tb is not None:
        if _is_checkpoints(tb.tb_frame):
            return True
        tb = tb.tb_next
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not _is_checkpoints(frame):
        frame = frame.f_back
    return frame is not None


def _is_checkpoints(frame: FrameType) -> bool:
    return frame.f_code.co_name == "backward" and frame.f_code.co_filename == torch.utils.checkpoint.__file__


def _outside(incident: Incident, ddp: Any) -> list[tuple[str, ast.AST, str]]:
    """Expressions in the functions around the failure that read parameters or layers of the wrapped module."""
    found: list[tuple[str, ast.AST, str]] = []
    parameters = {id(p) for p in parameters_in(ddp.module)}
    layers = {id(m) for m in modules_in(ddp.module)} - {id(ddp.module)}
    for file in user_files(incident):
        tree = module_ast(file)
        for node in inside(tree, ast.Attribute):
            if isinstance(parent_of(file, node), ast.Attribute):
                continue
            value = shared.evaluated(incident, file, node)
            called = isinstance(parent_of(file, node), ast.Call)
            if id(value) in parameters or (isinstance(value, nn.Module) and called and id(value) in layers):
                if any(isinstance(above, FUNCTIONS) for _, above in skips.inside_out(file, node)):
                    found.append((file, node, ast.unparse(node)))
            elif called and isinstance(value, type(None)):
                receiver = shared.evaluated(incident, file, node.value)
                if id(receiver) in parameters:
                    found.append((file, node.value, ast.unparse(node.value)))
    return found


def _shared(module: nn.Module, names: list[str]) -> list[str]:
    held = dict(named_parameters(module))
    wanted = {id(held[name]) for name in names if name in held}
    return [name for name, p in named_parameters(module, remove_duplicate=False) if id(p) in wanted]


RULE = Rule(
    code=CODE,
    name=NAME,
    summary="a parameter of a DistributedDataParallel module reports its gradient twice in one step",
    recognise=recognise,
    messages=("mark a variable ready only once", "marked as ready twice"),
    priority=40,
)
