"""Loops that train wrongly without an error: the cause, the line and the names are said."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from gradguard.core.diagnosis import Diagnosis
from tests.rules.protocol.protocol_programs_broken import BROKEN, source_of

# a partial detach is told by another rule too, and earlier, in traced steps
_ALSO = {"encoder_under_no_grad"}


@pytest.mark.parametrize("level", ["standard", "watch"])
@pytest.mark.parametrize("name", BROKEN)
def test_broken_loop_is_explained(said: Callable[..., list[Diagnosis]], name: str, level: str) -> None:
    rule, _, names = BROKEN[name]
    source = source_of(name)
    found = said(source, level)
    mine = [diagnosis for diagnosis in found if diagnosis.name == rule]
    if level == "watch" and rule == "zeroed-before-step" and not mine:
        pytest.skip("needs the steps traced after the first suspicion")
    assert mine, f"said {[(d.name, d.headline) for d in found]}"
    assert name in _ALSO or found == mine, [(d.name, d.headline) for d in found]
    diagnosis = mine[0]
    wanted = next(i for i, line in enumerate(source.splitlines(), 1) if line.endswith("# HERE"))
    assert diagnosis.culprit is not None
    assert (diagnosis.culprit.line, diagnosis.headline) == (wanted, diagnosis.headline)
    text = diagnosis.model_dump_json()
    assert all(word in text for word in names), diagnosis.headline
