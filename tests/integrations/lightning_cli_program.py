"""A LightningCLI script, run by the tests under either package: `python lightning_cli_program.py PACKAGE fit [OPTIONS]`."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

package = sys.argv.pop(1)
pl = import_module(package)


class Net(pl.LightningModule):  # type: ignore[misc, name-defined]
    """Broken where it is asked to be."""

    def __init__(self, broken: bool = False) -> None:
        super().__init__()
        self.broken = broken
        self.encoder, self.head = nn.Linear(4, 8), nn.Linear(8, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        hidden = torch.exp(self.encoder(x))
        if self.broken:
            hidden += 1  # the culprit
        return nn.functional.mse_loss(self.head(hidden), y)

    def train_dataloader(self) -> DataLoader[Any]:
        x = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-2)


if __name__ == "__main__":
    import_module(f"{package}.cli").LightningCLI(Net, save_config_callback=None)
