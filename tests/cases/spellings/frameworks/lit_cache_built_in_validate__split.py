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

from lit_cache_built_in_validate__split_parts import SequenceRegressor


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
