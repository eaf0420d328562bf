"""A failing step on a chain of 60,000 nodes: the program catches the error and goes on, as it would without a guard."""

from __future__ import annotations

import sys

import torch
from torch import nn

from gradguard import gradguard


def step(scale: nn.Parameter, spoilt: bool) -> None:
    x = torch.ones(2)
    for _ in range(30_000):
        x = torch.sin(x * scale)
    kept = torch.sigmoid(x)
    loss = kept.sum()
    if spoilt:
        kept.mul_(2)
    loss.backward()


def main() -> None:
    with gradguard(level=sys.argv[1]):
        step(nn.Parameter(torch.ones(2)), spoilt=False)
        print("stepped")
        try:
            step(nn.Parameter(torch.ones(2)), spoilt=True)
        except RuntimeError:
            print("caught")
    print("done")


main()
