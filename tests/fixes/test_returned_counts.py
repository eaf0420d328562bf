"""A custom backward that collects its gradients: what is said of the missing ones is only what the source shows."""

from __future__ import annotations

from pathlib import Path

from gradguard.core.diagnosis import Diagnosis
from tests.running import HEAD, run_source

COLLECTED = """
class Mix(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, strength):
        ctx.save_for_backward(x, weight)
        ctx.strength = strength
        return x @ weight * strength

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
{body}

first, second = nn.Linear(4, 4), nn.Parameter(torch.randn(4, 4), requires_grad=False)
Mix.apply(first(torch.randn(8, 4)), second, 0.5).sum().backward()
"""
APPENDED = """\
        grads = []
        if ctx.needs_input_grad[0]:
            grads.append(grad @ weight.t() * ctx.strength)
        if ctx.needs_input_grad[1]:
            grads.append(x.t() @ grad * ctx.strength)
        grads.append(None)
        return tuple(grads)"""
BY_INDEX = """\
        grads = [None] * 3
        if ctx.needs_input_grad[0]:
            grads[0] = grad @ weight.t() * ctx.strength
        if ctx.needs_input_grad[1]:
            grads[1] = x.t() @ grad * ctx.strength
        return tuple(grads)"""
HELPED = """\
        return tuple(g for g in (grad @ weight.t() * ctx.strength, None))"""
WRITTEN = """\
        return grad @ weight.t() * ctx.strength, x.t() @ grad * ctx.strength"""


def said(folder: Path, body: str) -> list[Diagnosis]:
    return [diagnosis for diagnosis, _ in run_source(folder, HEAD + COLLECTED.replace("{body}", body))]


def test_gradients_appended_under_a_condition_are_not_told_by_position(tmp_path: Path) -> None:
    diagnosis = said(tmp_path, APPENDED)[0]
    assert diagnosis.code == "GG403"
    assert "`strength`" not in diagnosis.headline  # the `None` for it is there: it is `weight` that leaves no place
    assert "needs_input_grad" in diagnosis.explanation
    assert "[None] * 3" in diagnosis.fixes[0].title
    assert "ctx.needs_input_grad[1]" in [span.text for span in diagnosis.related]


def test_gradients_put_at_their_index_are_sound(tmp_path: Path) -> None:
    assert not said(tmp_path, BY_INDEX)


def test_gradients_from_a_generator_name_no_input(tmp_path: Path) -> None:
    diagnosis = said(tmp_path, HELPED)[0]
    assert diagnosis.code == "GG403" and "nothing is returned for" not in diagnosis.headline
    assert "needs_input_grad" not in diagnosis.explanation and "return 3 values" in diagnosis.fixes[0].title


def test_a_written_tuple_still_names_the_input(tmp_path: Path) -> None:
    assert "nothing is returned for `strength`" in said(tmp_path, WRITTEN)[0].headline
