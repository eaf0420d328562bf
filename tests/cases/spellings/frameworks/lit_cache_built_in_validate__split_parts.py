import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Rotary(nn.Module):
    def __init__(self, dim, base=10000.0):
        super().__init__()
        self.register_buffer("inv_freq", base ** (-torch.arange(0, dim, 2).float() / dim), persistent=False)
        self.cos = self.sin = None

    def forward(self, x):
        if self.cos is None or self.cos.size(0) < x.size(1):
            angles = torch.outer(torch.arange(x.size(1)).float(), self.inv_freq)
            self.cos, self.sin = angles.cos(), angles.sin()  # <- culprit
        cos, sin = self.cos[: x.size(1)], self.sin[: x.size(1)]
        even, odd = x[..., ::2], x[..., 1::2]
        return torch.cat([even * cos - odd * sin, even * sin + odd * cos], dim=-1)  # <- raises


class SequenceRegressor(pl.LightningModule):
    def __init__(self, dim=16):
        super().__init__()
        self.inp = nn.Linear(1, dim)
        self.rotary = Rotary(dim)
        self.attn = nn.MultiheadAttention(dim, num_heads=2, batch_first=True)
        self.out = nn.Linear(dim, 1)

    def forward(self, series):
        h = self.inp(series.unsqueeze(-1))
        q = self.rotary(h)
        h, _ = self.attn(q, q, h, need_weights=False)
        return self.out(h.mean(dim=1)).squeeze(-1)

    def training_step(self, batch, batch_idx):
        series, target = batch
        return nn.functional.mse_loss(self(series), target)

    def validation_step(self, batch, batch_idx):
        series, target = batch
        self.log("val_mse", nn.functional.mse_loss(self(series), target))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)
