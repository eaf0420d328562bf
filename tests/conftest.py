"""What one test leaves in the process is not the next one's: tests pass in any order, and in any worker."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator

import pytest

from gradguard.torch_compat.private_api import dynamo_in_use


@pytest.fixture(autouse=True)
def nothing_compiled_is_left() -> Iterator[None]:
    """Where anything was compiled, gradguard puts no hook on modules: a later test would not see their calls."""
    assert not dynamo_in_use(), "something was compiled while tests were collected"
    yield
    if dynamo_in_use():
        sys.modules["torch._dynamo"].reset()
        gc.collect()
