"""Each transparency test starts and ends with an empty function-mode stack, grad mode on and PyTorch's once-warnings repeated."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from gradguard.session import current_session
from tests.transparency.helpers import LEVELS, stack_length


@pytest.fixture(autouse=True)
def untouched_process() -> Iterator[None]:
    torch.set_warn_always(True)
    assert stack_length() == 0
    yield
    assert stack_length() == 0
    assert torch.is_grad_enabled()
    torch.set_warn_always(False)
    session = current_session()
    left, faulty = list(session.guards), session.faulty
    while session.guards:  # one test's trouble is not the next one's
        session.close(session.guards[-1])
    session.faulty = False
    assert not left, "a guard was left open"
    assert not faulty, "gradguard's own bookkeeping failed"


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest) -> str:
    """Every level in turn."""
    return str(request.param)
