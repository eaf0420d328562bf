"""The closing summary: what moved, gradient norms by layer, what was found."""

from __future__ import annotations

import warnings

import torch
from torch import nn

from gradguard import gradguard


def test_summary_tells_norms_and_what_never_moved() -> None:
    torch.manual_seed(0)
    net = nn.ModuleDict({"used": nn.Linear(3, 1), "unused": nn.Linear(3, 1)})
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    guard = gradguard(summary=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with guard:
            for _ in range(40):
                opt.zero_grad()
                net["used"](torch.randn(4, 3)).pow(2).mean().backward()
                opt.step()
            summary = guard.summary()
    assert (summary.steps, summary.backwards) == (40, 40)
    (optimizer,) = summary.optimizers
    assert optimizer.type_name == "SGD" and optimizer.steps == 40
    assert {name.split(".")[-2] for name in optimizer.never_moved} == {"unused"}
    assert optimizer.without_gradient == optimizer.never_moved
    (layer,) = optimizer.norms
    assert layer.layer.endswith("used") and layer.first > 0 and layer.median > 0
    assert "never changed" in summary.text()


def test_summary_of_a_diverging_run_counts_nonfinite_steps() -> None:
    net = nn.Linear(3, 1)
    opt = torch.optim.SGD(net.parameters(), lr=0.0)
    guard = gradguard(summary=True, level="watch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with guard:
            for i in range(6):
                opt.zero_grad()
                (net(torch.ones(4, 3)).mean() * (float("nan") if i == 3 else 1.0)).backward()
                opt.step()
            summary = guard.summary()
    assert summary.optimizers[0].nonfinite_steps == 1
