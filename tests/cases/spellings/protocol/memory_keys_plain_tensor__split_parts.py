import torch
import torch.nn as nn
import torch.nn.functional as F


class NormalityMemory(nn.Module):
    def __init__(self, slots, channels):
        super().__init__()
        self.scale = channels ** -0.5
        self.keys = torch.randn(slots, channels, requires_grad=True)  # <- culprit
        self.values = torch.randn(slots, channels, requires_grad=True)  # <- culprit

    def forward(self, features):
        attention = F.softmax(features @ self.keys.t() * self.scale, dim=-1)
        return attention @ self.values


class StudentNet(nn.Module):
    def __init__(self, in_dim=10, channels=16, slots=6):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(in_dim, channels), nn.ReLU(), nn.Linear(channels, channels))
        self.memory = NormalityMemory(slots, channels)
        self.decoder = nn.Linear(channels, in_dim)

    def forward(self, x):
        return self.decoder(self.memory(self.encoder(x)))


def normal_samples(n, centers):
    return centers[torch.randint(0, len(centers), (n,))] + 0.05 * torch.randn(n, centers.size(1))
