import torch
from torch import nn


class LowRankMixer(nn.Module):
    """Mixes channels with the best rank-k approximation of a square weight."""

    def __init__(self, channels, rank):
        super().__init__()
        self.rank = rank
        self.mix = nn.Parameter(torch.empty(channels, channels))
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.eye_(self.mix)  # <- culprit

    def truncated(self):
        u, s, vh = torch.linalg.svd(self.mix)  # <- culprit # <- raises
        return u[:, :self.rank] @ torch.diag(s[:self.rank]) @ vh[:self.rank]

    def forward(self, x):
        return x @ self.truncated().t()


class Unmixer(nn.Module):
    def __init__(self, channels=8, rank=5):
        super().__init__()
        self.mixer = LowRankMixer(channels, rank)
        self.readout = nn.Linear(channels, 3)

    def forward(self, x):
        return self.readout(torch.tanh(self.mixer(x)))


def recordings(n, mixing):
    sources = torch.randn(n, 3)
    return sources @ mixing + 0.05 * torch.randn(n, 8), sources
