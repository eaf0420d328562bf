# /// case
# title = "The rotary table is built during trainer.validate and then used for training"
# source = "https://github.com/ai4co/rl4co/issues/272"
# outcome = "raises"
# torch_error = "Inference tensors cannot be saved for backward"
# cause = "inference-tensor"
# names = ["cos", "sin", "rotary"]
# fix = "keep the cached tables out of inference mode: Trainer(inference_mode=False) or build them in __init__"
# needs = ["lightning"]
# ///
import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def rotary_forward(owner, x):
    if owner.cos is None or owner.cos.size(0) < x.size(1):
        angles = torch.outer(torch.arange(x.size(1)).float(), owner.inv_freq)
        owner.cos, owner.sin = angles.cos(), angles.sin()  # <- culprit
    cos, sin = owner.cos[: x.size(1)], owner.sin[: x.size(1)]
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.cat([even * cos - odd * sin, even * sin + odd * cos], dim=-1)  # <- raises


class Rotary(nn.Module):
    def __init__(self, dim, base=10000.0):
        super().__init__()
        self.register_buffer("inv_freq", base ** (-torch.arange(0, dim, 2).float() / dim), persistent=False)
        self.cos = self.sin = None

    def forward(self, x):
        return rotary_forward(self, x)


def sequence_regressor_forward(owner, series):
    h = owner.inp(series.unsqueeze(-1))
    q = owner.rotary(h)
    h, _ = owner.attn(q, q, h, need_weights=False)
    return owner.out(h.mean(dim=1)).squeeze(-1)


def sequence_regressor_training_step(owner, batch, batch_idx):
    series, target = batch
    return nn.functional.mse_loss(owner(series), target)


def sequence_regressor_validation_step(owner, batch, batch_idx):
    series, target = batch
    owner.log("val_mse", nn.functional.mse_loss(owner(series), target))


def sequence_regressor_configure_optimizers(owner):
    return torch.optim.Adam(owner.parameters(), lr=1e-2)


class SequenceRegressor(pl.LightningModule):
    def __init__(self, dim=16):
        super().__init__()
        self.inp = nn.Linear(1, dim)
        self.rotary = Rotary(dim)
        self.attn = nn.MultiheadAttention(dim, num_heads=2, batch_first=True)
        self.out = nn.Linear(dim, 1)

    def forward(self, series):
        return sequence_regressor_forward(self, series)

    def training_step(self, batch, batch_idx):
        return sequence_regressor_training_step(self, batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        return sequence_regressor_validation_step(self, batch, batch_idx)

    def configure_optimizers(self):
        return sequence_regressor_configure_optimizers(self)


if __name__ == "__main__":
    torch.manual_seed(0)
    series = torch.randn(128, 12)
    loader = DataLoader(TensorDataset(series, series.mean(dim=1)), batch_size=32)
    model = SequenceRegressor()
    trainer = pl.Trainer(max_epochs=5, accelerator="cpu", logger=False, enable_checkpointing=False,
                         enable_progress_bar=False, enable_model_summary=False)
    before = trainer.validate(model, loader, verbose=False)[0]["val_mse"]  # <- related
    trainer.fit(model, loader)
    after = trainer.validate(model, loader, verbose=False)[0]["val_mse"]
    print(f"val mse {before:.4f} -> {after:.4f}")
