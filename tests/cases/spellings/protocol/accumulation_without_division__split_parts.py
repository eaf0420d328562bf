import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset


class ContextEncoder(nn.Module):
    def __init__(self, d_model=24):
        super().__init__()
        self.patch = nn.Linear(6, d_model)
        self.mix = nn.LSTM(d_model, d_model, batch_first=True)
        self.head = nn.Linear(d_model, 6)

    def forward(self, x):
        h, _ = self.mix(torch.relu(self.patch(x)))
        return self.head(h)


def series(n, length=12):
    phase = torch.rand(n, 1, 6) * 6.28
    speed = 0.3 + 0.5 * torch.rand(n, 1, 6)
    t = torch.arange(length + 1).view(1, -1, 1)
    wave = torch.sin(phase + speed * t)
    return TensorDataset(wave[:, :-1], wave[:, 1:])
