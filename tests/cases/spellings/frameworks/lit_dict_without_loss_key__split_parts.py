import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanAbsoluteError


class LitRegressor(pl.LightningModule):
    def __init__(self, hidden=32):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, hidden), nn.SiLU(), nn.Linear(hidden, 1))
        self.train_mae = MeanAbsoluteError()
        self.val_mae = MeanAbsoluteError()

    def forward(self, x):
        return self.net(x).squeeze(-1)

    def step(self, batch, stage):
        x, y = batch
        pred = self(x)
        loss = nn.functional.huber_loss(pred, y)
        metric = self.train_mae if stage == "train" else self.val_mae
        metric(pred.detach(), y)
        return {f"{stage}_loss": loss, "pred": pred.detach(), "target": y}  # <- culprit

    def training_step(self, batch, batch_idx):
        return self.step(batch, "train")  # <- culprit

    def validation_step(self, batch, batch_idx):
        return self.step(batch, "val")

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)
