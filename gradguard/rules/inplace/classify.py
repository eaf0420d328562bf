"""Which rule a broken saved value belongs to."""

from __future__ import annotations

from typing import Literal

from gradguard.rules.inplace.renormed import lookups_since
from gradguard.rules.inplace.spans import inside_forward
from gradguard.rules.inplace.write_history import Story

Kind = Literal["value", "step", "buffer"]


def kind_of(story: Story) -> Kind:
    """`step`: a parameter was updated (GG102); `buffer`: a module's buffer (GG108); `value`: anything else (GG101)."""
    first, state = story.blamed, story.state
    if first is not None and first.kind == "step":
        return "step"
    if state is None:
        return "value"
    if state.is_buffer:
        return "buffer"
    if lookups_since(story):
        return "value"
    if first is not None and (first.module is not None or first.grad_enabled or inside_forward(first.place)):
        return "value"
    return "step"
