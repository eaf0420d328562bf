"""What the rules for refused in-place operations share: PyTorch raised at the write itself, so the line is known."""

from __future__ import annotations

import ast
from functools import cached_property
from typing import Any

import torch
from torch import nn

from gradguard.analysis.incident import Incident
from gradguard.analysis.live.names import StateName
from gradguard.analysis.places.source import ResolvedSite, resolve
from gradguard.analysis.program.bindings import assignments_to
from gradguard.core.diagnosis import Role, SourceSpan, TensorFacts
from gradguard.core.safe_read import peek
from gradguard.rules.inplace import spans as tell
from gradguard.rules.inplace.aliases import Alias, aliases, assigned_before, written_name
from gradguard.rules.wording import shape_of
from gradguard.torch_compat.private_api import storage_key


class Refused:
    """The write that PyTorch refused.

    Attributes:
        incident: the failure.
    """

    def __init__(self, incident: Incident) -> None:
        self.incident = incident

    @property
    def place(self) -> ResolvedSite | None:
        """The user's line that wrote (or ran the module that did)."""
        return self.incident.place

    @cached_property
    def caller(self) -> ResolvedSite | None:
        """The line that called the function in which the write stands."""
        frames = self.incident.user_frames
        return resolve(frames[1].site) if len(frames) > 1 else None

    @cached_property
    def module(self) -> nn.Module | None:
        """The torch module that wrote, such as `nn.ReLU(inplace=True)`."""
        for view in self.incident.frames:
            if view.is_user:
                return None
            owner = view.locals.get("self") if view.code_name == "forward" else None
            if isinstance(owner, nn.Module):
                return owner
        return None

    @cached_property
    def written(self) -> str | None:
        """The variable that the line names."""
        return written_name(self.place, self.module is not None)

    @cached_property
    def chain(self) -> list[Alias]:
        """What it is an alias of."""
        lives = None if self.tensor is None else tell.lives_in(self.incident, storage_key(self.tensor))
        return aliases(self.place, self.caller, self.module is not None, lives=lives)

    @cached_property
    def tensor(self) -> torch.Tensor | None:
        """The written tensor, from the failed call or from the frame's variables."""
        candidates = [self.incident.kwargs.get("out"), *self.incident.args[:1]]
        for candidate in candidates:
            if isinstance(candidate, torch.Tensor):
                return candidate
            if isinstance(candidate, (list, tuple)):
                found = next((item for item in candidate if isinstance(item, torch.Tensor) and tell.is_parameter(item)), None)
                if found is not None:
                    return found
        found = self.value_of(self.written)
        return found if isinstance(found, torch.Tensor) else None

    def value_of(self, name: str | None) -> Any:
        """What a (dotted) name is in the innermost frame; attributes are read only from instance dictionaries and modules."""
        if name is None or not self.incident.user_frames:
            return None
        view = self.incident.user_frames[0]
        first, *rest = name.split(".")
        value = view.locals.get(first, view.globals.get(first))
        for part in rest:
            if isinstance(value, torch.Tensor):
                value = value.detach() if part == "data" else None
            else:
                value = peek(value, part, None)
        return value

    @cached_property
    def state(self) -> StateName | None:
        """The parameter or buffer that is written, or whose view is."""
        return None if self.tensor is None else self.incident.names.state(self.tensor)

    @property
    def feeds_the_graph(self) -> bool | None:
        """Whether what is written is computed in a forward pass, with a graph: under `no_grad` nothing behind it would be trained.

        None where the failed call's operands are not known.
        """
        if not any(isinstance(view.locals.get("self"), nn.Module) and view.code_name == "forward" for view in self.incident.user_frames):
            return False
        given = [*self.incident.args, *self.incident.kwargs.values()]
        tensors = [value for value in given if isinstance(value, torch.Tensor)]
        return any(value.requires_grad and value is not self.tensor for value in tensors) if tensors else None

    @property
    def text(self) -> str:
        """The write as the user wrote it; the module's name for a module's."""
        if self.module is not None:
            word, path = tell.module_word(self.module, self.incident)
            return word + (f" at `{path}`" if path else "")
        return f"`{tell.short(self.place.text if self.place else self.func)}`"

    @property
    def func(self) -> str:
        """The failed call's name."""
        return str(getattr(self.incident.func, "__name__", "the in-place operation"))

    def culprit(self, label: str) -> SourceSpan | None:
        """The write as the culprit."""
        return None if self.place is None else self.place.span(label, "culprit")

    def made(self, name: str, label: str, role: Role = "made") -> SourceSpan | None:
        """The last assignment to a variable before the write, in the same function or at module level."""
        place = self.place
        if place is None or place.source is None or place.source.tree is None:
            return None
        outside = [each for each in assignments_to(place.source.tree, name) if isinstance(each, (ast.Assign, ast.AnnAssign))]
        statement = assigned_before(place, name) or (outside[-1] if outside else None)
        return None if statement is None else place.source.span_of(statement, label, role)

    def helper(self) -> SourceSpan | None:
        """The caller's line, for a write in a helper."""
        if self.caller is None or self.place is None or self.place.function == "<module>" or self.place.function == self.caller.function:
            return None
        return self.caller.span(
            f"called from here, by `{self.caller.function.rpartition('.')[2]}`"
            if self.caller.function != "<module>"
            else "called from here",
            "context",
        )

    def facts(self) -> list[TensorFacts]:
        """The written tensor in figures."""
        tensor = self.tensor
        if tensor is None:
            return []
        state = self.state
        name = state.full if state is not None else self.written
        whole = None if state is None else peek(state.owner, state.path.rpartition(".")[2], None)
        if isinstance(whole, torch.Tensor) and shape_of(whole) != shape_of(tensor):
            name = f"a view of {name}"
        return [
            TensorFacts(
                name=name,
                kind="tensor" if state is None else "buffer" if state.is_buffer else "parameter",
                shape=shape_of(tensor),
                dtype=str(tensor.dtype).removeprefix("torch."),
                device=str(tensor.device),
                requires_grad=bool(tensor.requires_grad),
            )
        ]

    def alias_spans(self) -> list[SourceSpan]:
        """Where the aliases were made."""
        return tell.alias_spans(self.chain)

    def related(self, culprit: SourceSpan | None, *spans: SourceSpan | None) -> list[SourceSpan]:
        """The spans there are, without the culprit's own."""
        return tell.without(tell.compact(list(spans)), culprit)
