"""Fit a wave with a LightningModule.

`--break`: the running average of the loss, which is printed, keeps the graphs of all batches. Memory grows. Nothing is raised.
"""

import argparse
import logging
import warnings

import lightning
import torch
from torch import nn


class Regressor(lightning.LightningModule):
    def __init__(self, broken: bool) -> None:
        super().__init__()
        self.broken = broken
        self.net = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
        self.average = torch.zeros(())

    def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        if self.broken:
            self.average = 0.95 * self.average + 0.05 * loss
        else:
            self.average = 0.95 * self.average + 0.05 * loss.detach()
        return loss

    def on_train_epoch_end(self) -> None:
        print(f"epoch {self.current_epoch}: average loss {self.average.item():.3f}")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--break", dest="broken", action="store_true", help="run the program with its bug")
    parser.add_argument("--epochs", type=int, default=2)
    options = parser.parse_args()

    lightning.seed_everything(0, verbose=False)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    x = torch.rand(960, 1) * 6 - 3
    data = torch.utils.data.TensorDataset(x, x.sin())
    trainer = lightning.Trainer(
        max_epochs=options.epochs,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Regressor(options.broken), torch.utils.data.DataLoader(data, batch_size=16, shuffle=True))


if __name__ == "__main__":
    main()
