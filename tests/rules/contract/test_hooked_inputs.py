"""GG408: what a hooked module takes in, and which call registered the hook."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.running import applied, said

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


PARTS = """
class Body(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
    def forward(self, batch):
        {inside}
        return self.layer(batch)

stem, body = nn.Linear(4, 4), Body()
body.register_full_backward_hook(lambda module, *gradients: None)
out = body(stem(torch.randn(3, 4)))
{outside}
out.sum().backward()
"""


@pytest.mark.parametrize("level", ["standard", "forensic"])
@pytest.mark.parametrize(
    ("inside", "outside", "culprit", "words"),
    [
        ("batch[0] = 1.0", "", "batch[0] = 1.0", "`batch` is changed in place, but it is the input of `body`"),
        ("batch[:, 1:] *= 2", "", "batch[:, 1:] *= 2", "is a view of the input of `body`"),
        (
            "first = batch[0]; first.fill_(1.0)",
            "",
            "first.fill_(1.0)",
            "`first` is changed in place, but it is a view of the input",
        ),
        ("batch.t()[0] = 1.0", "", "batch.t()[0] = 1.0", "is a view of the input of `body`"),
        ("pass", "out[0] = 0.0", "out[0] = 0.0", "`out` is changed in place, but it is the output of `body`"),
    ],
)
def test_a_part_of_what_a_hooked_module_takes_or_gives(
    inside: str, outside: str, culprit: str, words: str, level: str, tmp_path: Path
) -> None:
    source = PARTS.format(inside=inside, outside=outside)
    (diagnosis,) = said(tmp_path, source, level)
    assert diagnosis.code == "GG408" and words in diagnosis.headline
    assert diagnosis.culprit is not None and diagnosis.culprit.text == culprit
    patch = diagnosis.fixes[0].patch
    assert (patch is not None) == (culprit in ("batch[0] = 1.0", "out[0] = 0.0"))
    assert patch is None or said(tmp_path, applied(source, patch), level) == []


def test_a_part_of_what_a_custom_function_gives(tmp_path: Path) -> None:
    source = """
class Select(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)
    @staticmethod
    def backward(ctx, grad):
        return grad * 2
class Twice(Select):
    pass
out = Twice.apply(nn.Linear(4, 4)(torch.randn(3, 4)))
out[0] = 0.0
"""
    (diagnosis,) = said(tmp_path, source)
    assert diagnosis.code == "GG407" and "`out` is written in place, but it is the output of `Twice`" in diagnosis.headline
    assert diagnosis.culprit is not None and diagnosis.culprit.text == "out[0] = 0.0"
