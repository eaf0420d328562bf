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


def lit_regressor_forward(owner, x):
    return owner.net(x).squeeze(-1)


def lit_regressor_step(owner, batch, stage):
    x, y = batch
    pred = owner(x)
    loss = nn.functional.huber_loss(pred, y)
    metric = owner.train_mae if stage == "train" else owner.val_mae
    metric(pred.detach(), y)
    return {f"{stage}_loss": loss, "pred": pred.detach(), "target": y}  # <- culprit


def lit_regressor_training_step(owner, batch, batch_idx):
    return owner.step(batch, "train")  # <- culprit


def lit_regressor_validation_step(owner, batch, batch_idx):
    return owner.step(batch, "val")


def lit_regressor_configure_optimizers(owner):
    return torch.optim.Adam(owner.parameters(), lr=1e-2)


class LitRegressor(pl.LightningModule):
    def __init__(self, hidden=32):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, hidden), nn.SiLU(), nn.Linear(hidden, 1))
        self.train_mae = MeanAbsoluteError()
        self.val_mae = MeanAbsoluteError()

    def forward(self, x):
        return lit_regressor_forward(self, x)

    def step(self, batch, stage):
        return lit_regressor_step(self, batch, stage)

    def training_step(self, batch, batch_idx):
        return lit_regressor_training_step(self, batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        return lit_regressor_validation_step(self, batch, batch_idx)

    def configure_optimizers(self):
        return lit_regressor_configure_optimizers(self)


torch.manual_seed(0)
x = torch.randn(256, 6)
y = x[:, 0] * 2 - x[:, 1] + 0.1 * torch.randn(256)
train = DataLoader(TensorDataset(x[:192], y[:192]), batch_size=32)
valid = DataLoader(TensorDataset(x[192:], y[192:]), batch_size=32)

model = LitRegressor()
trainer = pl.Trainer(max_epochs=5, accelerator="cpu", logger=False, enable_checkpointing=False,
                     enable_progress_bar=False, enable_model_summary=False)
trainer.fit(model, train, valid)  # <- raises
print("train mae", model.train_mae.compute().item())
