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


class Rotary(nn.Module):
    def __init__(self, dim, base=10000.0):
        super().__init__()
        register_buffer_ = self.register_buffer
        register_buffer_("inv_freq", base ** (-torch.arange(0, dim, 2).float() / dim), persistent=False)
        self.cos = self.sin = None

    def forward(self, x):
        if self.cos is None or self.cos.size(0) < x.size(1):
            part = torch.arange(x.size(1)).float()
            angles = torch.outer(part, self.inv_freq)
            cos_ = angles.cos  # <- culprit
            self.cos, self.sin = cos_(), angles.sin()  # <- culprit
        cos, sin = self.cos[: x.size(1)], self.sin[: x.size(1)]
        even, odd = x[..., ::2], x[..., 1::2]
        part_ = even * cos - odd * sin  # <- raises
        return torch.cat([part_, even * sin + odd * cos], dim=-1)  # <- raises


class SequenceRegressor(pl.LightningModule):
    def __init__(self, dim=16):
        super().__init__()
        self.inp = nn.Linear(1, dim)
        self.rotary = Rotary(dim)
        self.attn = nn.MultiheadAttention(dim, num_heads=2, batch_first=True)
        self.out = nn.Linear(dim, 1)

    def forward(self, series):
        q = self.rotary((h := self.inp(series.unsqueeze(-1))))
        attn_ = self.attn
        h, _ = attn_(q, q, h, need_weights=False)
        mean_ = h.mean
        return self.out(mean_(dim=1)).squeeze(-1)

    def training_step(self, batch, batch_idx):
        series, target = batch
        part__2 = self(series)
        return nn.functional.mse_loss(part__2, target)

    def validation_step(self, batch, batch_idx):
        series, target = batch
        log_ = self.log
        log_("val_mse", nn.functional.mse_loss(self(series), target))

    def configure_optimizers(self):
        part__3 = self.parameters()
        return torch.optim.Adam(part__3, lr=1e-2)


if __name__ == "__main__":
    torch.manual_seed(0)
    loader = DataLoader(TensorDataset((series := torch.randn(128, 12)), series.mean(dim=1)), batch_size=32)
    model = SequenceRegressor()
    trainer = pl.Trainer(max_epochs=5, accelerator="cpu", logger=False, enable_checkpointing=False,
                         enable_progress_bar=False, enable_model_summary=False)
    validate_ = trainer.validate  # <- related
    before = validate_(model, loader, verbose=False)[0]["val_mse"]  # <- related
    fit_ = trainer.fit
    fit_(model, loader)
    validate__2 = trainer.validate
    after = validate__2(model, loader, verbose=False)[0]["val_mse"]
    print(f"val mse {before:.4f} -> {after:.4f}")
