"""Small Lightning programs for the tests, made for whichever of the two packages is named."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

PACKAGES = ("pytorch_lightning", "lightning.pytorch")


def lightning(package: str = "pytorch_lightning") -> ModuleType:
    """The package, or the test is skipped."""
    pytest.importorskip(package.split(".", 1)[0])
    return import_module(package)


def loader(samples: int = 64, batch: int = 8) -> DataLoader[Any]:
    """Seeded data of a linear relation with noise."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, 4, generator=generator)
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=batch)


def regressor(pl: ModuleType, step: Any = None, **members: Any) -> Any:
    """A LightningModule with an encoder and a head; `step` and `members` replace methods."""

    def __init__(self: Any) -> None:
        pl.LightningModule.__init__(self)
        self.encoder = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.2))
        self.head = nn.Linear(8, 1)

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(x))  # type: ignore[no-any-return]

    def training_step(self: Any, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = nn.functional.mse_loss(self(x), y)
        self.log("loss", loss)
        return loss

    def validation_step(self: Any, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val", nn.functional.mse_loss(self(x), y))

    def configure_optimizers(self: Any) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-2)

    names = {"__init__": __init__, "forward": forward, "training_step": step or training_step, "validation_step": validation_step}
    torch.manual_seed(0)
    return type("Regressor", (pl.LightningModule,), {**names, "configure_optimizers": configure_optimizers, **members})()


def trainer(pl: ModuleType, folder: Path, *callbacks: Any, **options: Any) -> Any:
    """A quiet CPU trainer."""
    quiet: dict[str, Any] = dict.fromkeys(("enable_progress_bar", "enable_model_summary", "enable_checkpointing", "logger"), False)
    quiet["accelerator"] = "cpu"
    return pl.Trainer(**{**quiet, "max_epochs": 1, "default_root_dir": str(folder), "callbacks": list(callbacks), **options})


def weights(module: nn.Module) -> list[torch.Tensor]:
    """Copies of all parameters."""
    return [p.detach().clone() for p in module.parameters()]
