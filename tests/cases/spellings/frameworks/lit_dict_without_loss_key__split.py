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

from lit_dict_without_loss_key__split_parts import LitRegressor


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
