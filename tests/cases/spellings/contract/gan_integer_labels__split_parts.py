import torch
from torch import nn

REAL, FAKE = 1, 0


def mlp(sizes, last=None):
    layers = []
    for a, b in zip(sizes[:-1], sizes[1:]):
        layers += [nn.Linear(a, b), nn.LeakyReLU(0.2)]
    layers.pop()
    if last is not None:
        layers.append(last)
    return nn.Sequential(*layers)


def ring(n):
    angle = torch.rand(n) * 6.2832
    return torch.stack([angle.cos(), angle.sin()], 1) + 0.02 * torch.randn(n, 2)


class Labels:
    """Keeps one label tensor and refills it, as in the classic GAN examples."""

    def __init__(self, batch):
        self.label = torch.full((batch, 1), REAL)  # <- culprit

    def fill(self, value):
        return self.label.fill_(value)
