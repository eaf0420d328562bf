# /// case
# title = "training_step returns its loss under the name train_loss"
# source = "https://github.com/Lightning-AI/pytorch-lightning/issues/7750"
# outcome = "raises"
# torch_error = "the 'loss' key needs to be present"
# cause = "lightning-loss-key-missing"
# names = ["train_loss", "training_step"]
# fix = "return the loss under the key 'loss'"
# needs = ["lightning"]
# ///
import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanAbsoluteError


class LitRegressor(pl.LightningModule):
    def __init__(self, hidden=32):
        super().__init__()
        part = nn.Linear(6, hidden)
        self.net = nn.Sequential(part, nn.SiLU(), nn.Linear(hidden, 1))
        self.train_mae = MeanAbsoluteError()
        self.val_mae = MeanAbsoluteError()

    def forward(self, x):
        net_ = self.net
        return net_(x).squeeze(-1)

    def step(self, batch, stage):
        x, y = batch
        pred = self(x)
        loss = nn.functional.huber_loss(pred, y)
        metric = self.train_mae if stage == "train" else self.val_mae
        detach_ = pred.detach
        metric(detach_(), y)
        return {f"{stage}_loss": loss, "pred": pred.detach(), "target": y}  # <- culprit

    def training_step(self, batch, batch_idx):
        go = self.step  # <- culprit
        return go(batch, "train")  # <- culprit

    def validation_step(self, batch, batch_idx):
        go_ = self.step
        return go_(batch, "val")

    def configure_optimizers(self):
        part_ = self.parameters()
        return torch.optim.Adam(part_, lr=1e-2)


torch.manual_seed(0)
x = torch.randn(256, 6)
part__2 = x[:, 0] * 2 - x[:, 1]
y = part__2 + 0.1 * torch.randn(256)
part__3 = TensorDataset(x[:192], y[:192])
train = DataLoader(part__3, batch_size=32)
valid, model = DataLoader(TensorDataset(x[192:], y[192:]), batch_size=32), LitRegressor()
trainer = pl.Trainer(max_epochs=5, accelerator="cpu", logger=False, enable_checkpointing=False,
                     enable_progress_bar=False, enable_model_summary=False)
fit_ = trainer.fit  # <- raises
fit_(model, train, valid)  # <- raises
print("train mae", model.train_mae.compute().item())
