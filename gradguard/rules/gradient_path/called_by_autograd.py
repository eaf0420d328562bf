"""Grad mode that autograd itself switches off around code of the program's: hooks that run in backward, and the methods of a Function."""

from __future__ import annotations

import ast
from dataclasses import dataclass

from gradguard.analysis.history.cut_origins import Origin
from gradguard.analysis.incident import Incident
from gradguard.analysis.live.frames import FrameView
from gradguard.analysis.places.sites import in_words
from gradguard.analysis.places.source import ResolvedSite, at_line, resolve
from gradguard.analysis.program.syntax import Source
from gradguard.core.diagnosis import Fix
from gradguard.fixes.edits import indent_of, patched


@dataclass
class Called:
    """The function that autograd called.

    Attributes:
        what: "a hook", "the forward of a custom Function", "the backward of a custom Function".
        name: the function's.
        place: where it stood when the incident came.
    """

    what: str
    name: str
    place: ResolvedSite

    @property
    def clause(self) -> str:
        return "hooks run in backward, with grad mode off" if self.what == "a hook" else f"{self.what} runs with grad mode off"

    @property
    def why(self) -> str:
        which = "A hook runs while backward is under way" if self.what == "a hook" else f"`apply` and backward call {self.what} themselves"
        return (
            f"{which}, and grad mode is off there without any `no_grad` block in the program: what is computed in `{self.name}` has no"
            " graph unless it is switched on again."
        )


def called_by_autograd(incident: Incident, origin: Origin) -> Called | None:
    """The hook or Function in which the path was lost, where no block of the program's switched grad mode off."""
    if origin.kind != "no_grad":
        return None
    frames = list(incident.frames)
    start = next((i for i, view in enumerate(frames) if view.is_user), None)
    end = None if start is None else next((i for i in range(start, len(frames)) if not frames[i].is_user), None)
    if start is None or end is None or end == start:
        return None
    what, place = _caller(frames[end], frames[end - 1]), resolve(frames[end - 1].site)
    if what is None or place is None:
        return None
    inside = {_function(view) for view in frames[start:end]}
    if origin.switch is not None and origin.switch.how != "caller" and origin.switch.span.function in inside:
        return None  # a block around backward is no reason: autograd switches grad mode off all the same
    if origin.place is not None and origin.place.function not in inside and (origin.outer is None or origin.outer.function not in inside):
        return None
    return Called(what, place.function.rpartition(".")[2], place)


def _function(view: FrameView) -> str:
    place = resolve(view.site)
    return "" if place is None else place.function


def _caller(torch_frame: FrameView, user_frame: FrameView) -> str | None:
    code, file = torch_frame.frame.f_code, torch_frame.frame.f_code.co_filename.replace("\\", "/")
    if file.endswith("torch/autograd/function.py") and code.co_name == "apply":
        own = user_frame.frame.f_code.co_name
        return f"the {own if own in ('forward', 'backward') else 'method'} of a custom Function"
    if file.endswith("torch/utils/hooks.py") or (file.endswith("torch/autograd/graph.py") and code.co_name == "_engine_run_backward"):
        return "a hook"
    return None


def computed_at(called: Called, root: str, place: ResolvedSite | None) -> ResolvedSite | None:
    """Untraced: the statement of the function that computed the root, the last before backward was called on it."""
    body = _block(called.place.source, place.statement if place is not None else None)
    if place is None or place.source is None or place.statement is None or body is None:
        return None
    before = body[: body.index(place.statement)]
    named = [item for item in before if _assigns(item, root)]
    return at_line(place.file, named[-1].lineno) if named else None


def with_grad(root: str, first: ResolvedSite | None, backward: ResolvedSite | None) -> Fix:
    """`enable_grad` around everything from the line that lost the path to the one that made the root."""
    title = f"Switch grad mode on for it: `with torch.enable_grad():` around all lines that {in_words(root)} is computed by"
    source = None if backward is None else backward.source
    body = _block(source, backward.statement if backward is not None else None)
    patch = None
    if source is not None and body is not None and backward is not None and backward.statement is not None and first is not None:
        last = body.index(backward.statement)
        start = next((i for i, item in enumerate(body) if item is first.statement), None)
        if start is not None and start <= last and source.imports.get("torch") == "torch":
            made = [i for i in range(start, last) if _assigns(body[i], root)]
            wrapped = body[start : (made[-1] if made else max(last - 1, start)) + 1]
            patch = _indented(source, wrapped[0], wrapped[-1])
    detail = "Grad mode is off there by itself; nothing else is to be changed."
    return Fix(title=title, safety="unsafe" if patch else "manual", patch=patch, detail=detail)


def _assigns(statement: ast.stmt, root: str) -> bool:
    return isinstance(statement, ast.Assign) and any(ast.unparse(target) == root for target in statement.targets)


def _block(source: Source | None, statement: ast.stmt | None) -> list[ast.stmt] | None:
    """The statements among which one stands."""
    above = None if source is None or statement is None else source.parents.get(statement)
    for name in ("body", "orelse", "finalbody"):
        block = getattr(above, name, None)
        if isinstance(block, list) and any(item is statement for item in block):
            return block
    return None


def _indented(source: Source, first: ast.stmt, last: ast.stmt) -> str | None:
    lines = source.lines[first.lineno - 1 : last.end_lineno]
    inner = [f"    {line.rstrip()}" if line.strip() else "" for line in lines]
    head = f"{indent_of(source, first.lineno)}with torch.enable_grad():"
    end = len(lines[-1].rstrip("\n").encode())
    return patched(source, [((first.lineno, 0, last.end_lineno or last.lineno, end), "\n".join([head, *inner]))])
