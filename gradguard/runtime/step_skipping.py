"""Leaving out an optimizer's step, where a rule's setting asks for it: official hooks cannot stop a step, but a parameter without
gradient is passed over by every optimizer of PyTorch's, its state included."""

from __future__ import annotations

from typing import Any

import torch

Withheld = list[tuple[torch.Tensor, torch.Tensor]]  # parameter, its gradient; for the time of one step() call


def withhold_gradients(optimizer: Any, withheld: Withheld) -> None:
    """Takes the gradients of an optimizer's parameters away, into a list that knows each of them before it is gone."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                withheld.append((parameter, parameter.grad))
                parameter.grad = None


def give_back_gradients(withheld: Withheld) -> None:
    """Puts them back where nothing else has been put meanwhile, and empties the list."""
    while withheld:
        parameter, gradient = withheld[-1]
        if parameter.grad is None:
            parameter.grad = gradient
        withheld.pop()
