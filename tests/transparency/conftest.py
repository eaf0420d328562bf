"""Each transparency test starts and ends with an empty function-mode stack, grad mode on and PyTorch's once-warnings repeated."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from gradguard.runtime.session import current_session
from tests.transparency.helpers import LEVELS, stack_length


@pytest.fixture(autouse=True)
def untouched_process() -> Iterator[None]:
    torch.set_warn_always(True)
    assert stack_length() == 0
    yield
    # whatever is wrong is put right before it is told: one test's trouble is not the next one's
    torch.set_warn_always(False)
    modes = [torch._C._pop_torch_function_stack() for _ in range(stack_length())]
    grad_mode = torch.is_grad_enabled()
    torch.set_grad_enabled(True)
    session = current_session()
    left, faulty = list(session.guards), session.faulty
    while session.guards:
        session.close(session.guards[-1])
    session.faulty = False
    assert not modes, "a function mode was left on the stack"
    assert grad_mode, "grad mode was left off"
    assert not left, "a guard was left open"
    assert not faulty, "gradguard's own bookkeeping failed"


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest) -> str:
    """Every level in turn."""
    return str(request.param)
