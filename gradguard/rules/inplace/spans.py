"""What the in-place rules say in common: names, places, labels."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import nn

from gradguard.analysis.incident import Incident
from gradguard.analysis.live.names import StateName, short_list
from gradguard.analysis.places.source import ResolvedSite, assignments_to, function_def
from gradguard.core.diagnosis import Confidence, Diagnosis, SourceSpan, TensorFacts
from gradguard.core.foreign_exceptions import internal_error
from gradguard.core.safe_read import peek
from gradguard.rules.inplace.aliases import Alias, Lives, aliases, is_view, list_item, parameters_of, written_name
from gradguard.rules.inplace.wording import times, why_needed
from gradguard.rules.inplace.write_history import Story, Write
from gradguard.rules.wording import shape_of
from gradguard.torch_compat.private_api import storage_key

UNSEEN = (
    "this step was not traced, so the write was looked for in the source; `level: strict` (or GRADGUARD_LEVEL=strict) "
    "traces every step and names the line for certain"
)
UNEXPLAINED = "this step was traced, but no write that was seen explains it; it was looked for in the source"
_MOST_TOLD = 8  # lines that trials may tell apart
NO_DATA = (
    "writing through `.data`, `.detach()` or numpy instead: the error goes away because PyTorch can no longer see the write, "
    "and the gradient is silently wrong"
)
NO_RETAIN = "`retain_graph=True`: the graph is not what is missing; the overwritten value is"


def short(text: str | None, limit: int = 70) -> str:
    """An expression on one line, cut where it is long."""
    flat = " ".join((text or "").split())
    return flat if len(flat) <= limit else flat[: limit - 3].rstrip() + "..."


def module_word(module: nn.Module, incident: Incident) -> tuple[str, str | None]:
    """A module in words and its path: ("`nn.Dropout(inplace=True)`", "model.blocks.0.dropout")."""
    kind = type(module).__name__
    flag = "inplace=True" if peek(module, "inplace", False) is True else ""
    prefix = "nn." if type(module).__module__.startswith("torch.nn.") else ""
    return f"`{prefix}{kind}({flag})`", incident.names.module_path(module)


class Target:
    """The written variable, and whose memory it is."""

    def __init__(self, story: Story, write: Write) -> None:
        self.write = write
        by_module = write.module is not None
        self.written = written_name(write.place, by_module)
        lives = lives_in(story.incident, story.mismatch.storage)
        self.chain: list[Alias] = aliases(write.place, write.caller, by_module, lives=lives) if write.place is not None else []
        if lives is not None and self.written is not None and write.place is not None and lives(self.written, write.place) is False:
            self.written, self.chain = None, []  # the line names something else, such as a function that writes
        item = None if by_module else list_item(write.place)
        if item is not None and write.place is not None and write.place.source is not None:
            self.written, self.chain = write.place.source.flat(item), []
        self.state: StateName | None = story.state
        incident = story.incident
        storage = story.mismatch.storage
        self.around = incident.names.of_storage(storage) if storage is not None else []

    @property
    def name(self) -> str | None:
        """The name a reader would know the value by."""
        if self.state is not None:
            return self.state.full
        if self.chain:
            return self.chain[-1].base
        return self.written or (self.around[0] if self.around else None)

    @property
    def phrase(self) -> str:
        """`disp` (through `flat`, a view of it)."""
        name = f"`{self.name}`" if self.name else "a tensor"
        if self.written and self.name != self.written and (self.chain or self.state is not None):
            if self.chain and self.chain[0].call == "argument" and len(self.chain) == 1:
                return f"{name} (which is `{self.written}` here)"
            if self.state is not None and self.name is not None and self.name.endswith(self.written.removeprefix("self")):
                return name
            view = "which shares its memory" if self.chain and self.chain[0].call in ("detach", "data", "argument") else "a view of it"
            return f"{name} (through `{self.written}`, {view if self.chain else 'which is it'})"
        if self.written and not self.chain and self.write.place is not None and is_view(self.write.place, self.written):
            return f"the tensor that {name} is a view of"
        return name

    def spans(self) -> list[SourceSpan]:
        """The places that made the aliases."""
        return alias_spans(self.chain)


def lives_in(incident: Incident, storage: int | None) -> Lives | None:
    """Whether a variable around the incident is a tensor on this memory: asked before a name from the source is told of it."""
    if storage is None:
        return None

    def lives(name: str, place: ResolvedSite) -> bool | None:
        scope = place.enclosing_function
        for view in incident.user_frames:
            code = view.frame.f_code
            if code.co_filename != place.file:
                continue
            if function_def(code) is scope and name in view.locals:
                value = view.locals[name]
            elif (scope is None or not _is_local(scope, name)) and name in view.globals:
                value = view.globals[name]
            else:
                continue
            if type(value) in (torch.Tensor, nn.Parameter):
                return storage_key(value) == storage
            return False if type(value) is FunctionType else None
        return None

    return lives


def _is_local(scope: Any, name: str) -> bool:
    return name in parameters_of(scope) or bool(assignments_to(scope, name))


def alias_spans(chain: list[Alias]) -> list[SourceSpan]:
    """The places that made the aliases, each with its word."""
    found = []
    for link in chain:
        if link.call == "argument":
            if link.base == link.name:
                continue
            label = f"`{link.base}` is passed here as `{link.name}`"
        elif link.call == "for":
            label = f"each `{link.name}` is a view of `{link.base}`"
        elif link.call in ("detach", "data", "numpy"):
            label = f"`{short(link.text, 40)}` shares its memory with `{link.base}`: it is not a copy"
        else:
            label = f"`{link.name}` is a view of `{link.base}`: both are the same memory"
        found.append(link.span.model_copy(update={"label": label, "role": "made"}))
    return found


def saved_span(story: Story) -> SourceSpan | None:
    """Where the value was saved."""
    place = story.saved_at
    if place is None:
        return None
    what = "its result" if story.mismatch.slot in ("result", "output", "result0") else "an input of it"
    return place.span(f"`{story.op_word}` saved {what} here for its backward (version {story.mismatch.expected})", "saved")


def backward_span(story: Story) -> SourceSpan | None:
    """Where backward was called."""
    place = story.incident.place
    if place is None:
        return None
    return place.span(f"backward needed version {story.mismatch.expected}, found version {story.mismatch.found}", "backward")


def tensor_facts(story: Story, name: str | None) -> TensorFacts:
    """The saved value in figures."""
    tensor, state = story.mismatch.tensor, story.state
    return TensorFacts(
        name=state.full if state is not None else _viewed(story, name),
        kind="tensor" if state is None else "buffer" if state.is_buffer else "parameter",
        shape=shape_of(tensor),
        dtype=None if tensor is None else str(tensor.dtype).removeprefix("torch."),
        device=None if tensor is None else str(tensor.device),
        version_saved=story.mismatch.expected,
        version_found=story.mismatch.found,
    )


def _viewed(story: Story, name: str | None) -> str | None:
    """The variable's name, or that it was a view of it which was saved: the shape that is shown is the view's."""
    whole = next((view.locals[name] for view in story.incident.user_frames if name in view.locals), None) if name else None
    if isinstance(whole, torch.Tensor):
        viewed = shape_of(whole) != shape_of(story.mismatch.tensor)
    else:
        saved = story.mismatch.tensor
        try:
            viewed = saved is not None and saved.numel() * saved.element_size() < saved.untyped_storage().nbytes()
        except internal_error():  # tensors without memory of their own
            viewed = False
    return f"a view of {name}" if viewed and name is not None else name


def why(story: Story) -> str:
    """Why backward needs the value, as a sentence without an end."""
    from gradguard.analysis.graph.walk import op_name

    return why_needed(story.op_word, op_name(story.mismatch.node), story.mismatch.slot)


def other_writes(story: Story) -> list[str]:
    """A note on the writes after the first."""
    writes = story.writes
    if not writes:
        return []
    first, counts = writes[0], dict[tuple[str, int], list[Write]]()
    for write in writes[1:]:
        if write.place is not None:
            counts.setdefault((write.place.file, write.place.line), []).append(write)
    notes, same = [], 0
    if first.place is not None:
        same = len(counts.pop((first.place.file, first.place.line), []))
    if same and first.place is not None and first.kind != "step":
        notes.append(f"line {first.place.line} wrote {times(same + 1)} after the value was saved")
    for group in list(counts.values())[:4]:
        place = group[0].place
        assert place is not None  # only those were counted
        often = "" if len(group) == 1 else f" ({times(len(group))})"
        notes.append(f"also written at line {place.line}{often}, later: `{short(place.text)}`")
    return notes


def helper_span(write: Write, chain: list[Alias]) -> SourceSpan | None:
    """The line that called the helper in which the write stands, unless an alias already shows it."""
    caller = write.caller
    if caller is None or write.place is None or write.kind == "step":
        return None
    shown = [link for link in chain if link.call != "argument" or link.base != link.name]
    if any(link.span.file == caller.file and caller.line <= link.span.line <= caller.end_line for link in shown):
        return None
    if (caller.file, caller.line) == (write.place.file, write.place.line):
        return None
    return caller.span(f"leads to `{function_word(write.place.function)}`, which writes", "context")


def function_word(qualname: str) -> str:
    """`forward` alone says little: `Net.forward`; other functions by their own name."""
    parts = [part for part in qualname.split(".") if part != "<locals>"]
    return ".".join(parts[-2:]) if parts[-1] in ("forward", "__call__") else parts[-1]


def inside_forward(place: ResolvedSite | None) -> bool:
    """Whether the place stands in a `forward` (or `__call__`) method."""
    return place is not None and place.function.rpartition(".")[2] in ("forward", "__call__")


def is_parameter(value: Any) -> bool:
    """Whether it is a leaf that trains."""
    return isinstance(value, torch.Tensor) and value.requires_grad and value.grad_fn is None


def compact(spans: list[SourceSpan | None]) -> list[SourceSpan]:
    """The spans there are, each place once."""
    found: dict[tuple[str, int, int | None, int | None], SourceSpan] = {}
    for span in spans:
        if span is not None:
            found.setdefault((span.file, span.line, span.column, span.end_column), span)
    return list(found.values())


def without(spans: list[SourceSpan], culprit: SourceSpan | None) -> list[SourceSpan]:
    """The spans that are not the culprit's own."""
    if culprit is None:
        return spans
    own = (culprit.file, culprit.line, culprit.column, culprit.end_column)
    return [span for span in spans if (span.file, span.line, span.column, span.end_column) != own]


def with_guesses(tell: Callable[[Story, Write], Diagnosis], story: Story) -> Diagnosis:
    """The diagnosis, and what was not seen, where the line comes from the source or is not known."""
    diagnosis = tell(story, story.blamed or Write("op", 0, None, ""))
    if story.writes:
        return diagnosis
    notes = [UNEXPLAINED if story.incident.traced else UNSEEN]
    blamed = story.blamed
    others = [write for write in story.guesses if write is not blamed and write.place is not None]
    if others:
        listed = ", ".join(f"line {write.place.line} (`{short(write.place.text, 40)}`)" for write in others[:4] if write.place is not None)
        notes.append(
            ("other statements that may have written it: " if blamed is not None else "statements that may have written it: ") + listed
        )
    modules = [write.module for write in story.guesses if write.module is not None]
    if blamed is None and modules and len(modules) == len(story.guesses):
        paths = [path for module in modules if (path := module_word(module, story.incident)[1]) is not None]
        notes.append(f"modules that work in place (`inplace=True`) and may have written it: {short_list(paths)}")
    confidence: Confidence = blamed.sure if blamed is not None else "certain"
    written = [*story.guesses, *story.unlikely]
    told = [tell(story, write) for write in written] if len(written) <= _MOST_TOLD else []
    return diagnosis.model_copy(update={"notes": [*diagnosis.notes, *notes], "confidence": confidence, "alternatives": told})
