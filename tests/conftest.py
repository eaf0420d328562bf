"""What one test leaves in the process is not the next one's: tests pass in any order, and in any worker."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator

import pytest
import torch

from gradguard.instrumentation import journal
from gradguard.runtime import session
from gradguard.runtime.session import current_session


@pytest.fixture(autouse=True)
def nothing_compiled_is_left() -> Iterator[None]:
    """Dynamo's caches and counters, and where torch puts its warnings, depend on what was compiled before."""
    assert not _dynamo_in_use(), "something was compiled while tests were collected"
    yield
    if _dynamo_in_use():
        sys.modules["torch._dynamo"].reset()
        gc.collect()


@pytest.fixture(autouse=True)
def no_transform_is_left() -> Iterator[None]:
    """A level of `torch.func` that stays on its stack wraps the tensors of every later test."""
    yield
    assert torch._C._functorch.peek_interpreter_stack() is None


@pytest.fixture(autouse=True)
def a_session_of_its_own() -> Iterator[None]:
    """What the thread's session and journal remember of one test, a fault or facts of earlier steps, is not another's."""
    yield
    if not current_session().guards:
        session._local.session = journal._local.journal = None


def _dynamo_in_use() -> bool:
    backends = getattr(sys.modules.get("torch._dynamo.eval_frame"), "cached_backends", None)
    return backends is not None and any(backend is not None for backend in backends.values())
