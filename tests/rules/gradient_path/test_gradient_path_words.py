"""Details of what is said: exact expressions, patches, and the second problem behind the first."""

from __future__ import annotations

import pytest
import torch

from gradguard import gradguard
from gradguard.core.errors import GradGuardError


def test_the_detaching_expression_is_marked_exactly_and_can_be_dropped() -> None:
    w = torch.ones(3, requires_grad=True)
    with pytest.raises(GradGuardError) as caught, gradguard():
        scaled = w * 2
        features = scaled.detach()
        loss = features.sum()
        loss.backward()
    diagnosis = caught.value.diagnosis
    assert diagnosis.code == "GG302"
    assert diagnosis.culprit is not None and diagnosis.culprit.text == "scaled.detach()"
    assert "`features`" in diagnosis.headline
    patch = diagnosis.fixes[0].patch
    assert patch is not None and "+        features = scaled\n" in patch


def test_a_vector_loss_waits_behind_the_detached_one() -> None:
    w = torch.ones(3, requires_grad=True)
    with pytest.raises(GradGuardError) as caught, gradguard():
        loss = (w * 2).detach() + 1
        loss.backward()
    assert any("second problem" in note and "3 elements" in note for note in caught.value.diagnosis.notes)


def test_a_given_gradient_is_no_second_problem() -> None:
    w = torch.ones(3, requires_grad=True)
    with pytest.raises(GradGuardError) as caught, gradguard():
        loss = (w * 2).detach() + 1
        loss.backward(torch.ones(3))
    assert not any("second problem" in note for note in caught.value.diagnosis.notes)


def test_making_the_loss_a_leaf_is_advised_against() -> None:
    w = torch.ones(3, requires_grad=True)
    with pytest.raises(GradGuardError) as caught, gradguard():
        with torch.no_grad():
            loss = (w * 2).sum()
        loss.backward()
    diagnosis = caught.value.diagnosis
    assert diagnosis.code == "GG301"
    assert diagnosis.culprit is not None and diagnosis.culprit.text == "torch.no_grad()"
    assert any("requires_grad_(True)" in warning for warning in diagnosis.avoid)


def test_sample_is_repaired_to_rsample() -> None:
    mu = torch.zeros(3, requires_grad=True)
    with pytest.raises(GradGuardError) as caught, gradguard():
        dist = torch.distributions.Normal(mu, torch.ones(3))
        z = dist.sample()
        loss = z.pow(2).sum()
        loss.backward()
    diagnosis = caught.value.diagnosis
    assert diagnosis.code == "GG304"
    patch = diagnosis.fixes[0].patch
    assert patch is not None and "+        z = dist.rsample()\n" in patch


def test_grad_of_a_module_attribute_that_is_no_leaf() -> None:
    class Probe:
        def __init__(self) -> None:
            self.delta = torch.zeros(3, requires_grad=True) + 0.1

    probe = Probe()
    with pytest.raises(AttributeError) as caught, gradguard():
        (probe.delta * 2).sum().backward()
        probe.delta.grad.sign()  # type: ignore[union-attr]
    assert isinstance(caught.value, GradGuardError)
    assert caught.value.diagnosis.code == "GG307"
    assert "`probe.delta`" in caught.value.diagnosis.headline


def test_numbers_kept_in_a_list_are_repaired_together_with_what_is_made_of_the_list() -> None:
    w = torch.ones(3, requires_grad=True)
    with pytest.raises(GradGuardError) as caught, gradguard():
        losses = []
        for part in w:
            losses.append((part * 2).item())
        loss = torch.tensor(losses).mean()
        loss.backward()
    fix = caught.value.diagnosis.fixes[0]
    assert fix.patch is not None and "losses.append(part * 2)" in fix.patch and "torch.stack(losses).mean()" in fix.patch
