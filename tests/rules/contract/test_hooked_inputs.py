"""GG408: what a hooked module takes in, and which call registered the hook."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.running import said

SOURCE = """
class Shift(nn.Module):
    def forward(self, batch):
        {write}
        return batch.clone()

def look(module, grad_input, grad_output):
    pass

def other(module, grad_input, grad_output):
    pass

shift, layer = Shift(), nn.Linear(3, 3)
layer.register_full_backward_hook(other)
shift.{register}(look)
shift(torch.rand(3, requires_grad=True).clone())
"""


@pytest.mark.parametrize("write", ["batch += 1", "batch.add_(1)"])
@pytest.mark.parametrize("register", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_an_argument_of_the_hooked_forward_is_its_input(write: str, register: str, tmp_path: Path) -> None:
    source = SOURCE.format(write=write, register=register)
    if register.endswith("pre_hook"):
        source = source.replace("(module, grad_input, grad_output)", "(module, *gradients)")
    (diagnosis,) = said(tmp_path, source)
    assert diagnosis.code == "GG408" and "it is the input of `shift`" in diagnosis.headline
    assert [span.text for span in diagnosis.related if span.role == "declared"] == [f"shift.{register}(look)"]
