"""A fit on two ranks (strategy ddp, CPU), run as a script by `test_lightning_ddp.py`: Lightning starts it again for rank 1.

Arguments: a folder, a level or "bare", and "sound", "inplace", "unused" (a branch that gets no gradient), or
"manual" and "bypassed" (manual optimization, with `manual_backward` and without).
"""

from __future__ import annotations

import json
import os
import sys
import zlib
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

FOLDER, LEVEL, KIND = sys.argv[1:4]


class Regressor(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.2))
        self.head = nn.Linear(8, 1)
        self.spare = nn.Linear(8, 1) if KIND == "unused" else None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        hidden = torch.sigmoid(self.encoder(x))
        if KIND == "inplace":
            hidden *= 2
        return nn.functional.mse_loss(self.head(hidden), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


class ByHand(Regressor):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(x))  # type: ignore[no-any-return]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        opt: Any = self.optimizers()
        opt.zero_grad()
        loss = nn.functional.mse_loss(self(x), y)
        if KIND == "manual":
            self.manual_backward(loss)
        else:
            loss.backward()
        opt.step()


def main() -> None:
    callbacks: list[Any] = []
    if LEVEL != "bare":
        from gradguard.integrations.lightning import GradGuardCallback

        callbacks.append(GradGuardCallback(level=LEVEL))
    pl.seed_everything(0, verbose=False)
    x = torch.randn(64, 4)
    model = ByHand() if KIND in ("manual", "bypassed") else Regressor()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=2,
        default_root_dir=FOLDER,
        callbacks=callbacks,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    error = ""
    try:
        trainer.fit(model, DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8))
    except RuntimeError as raised:
        error = str(raised)
    result = {
        "parameters": [zlib.crc32(p.detach().numpy().tobytes()) for p in model.parameters()],
        "said": [json.loads(diagnosis.model_dump_json()) for guard in callbacks for diagnosis in guard.diagnoses],
        "error": error,
    }
    Path(FOLDER, f"rank{trainer.global_rank}.json").write_text(json.dumps(result))
    os._exit(0)  # a rank whose peer has failed would wait in the process group's end


if __name__ == "__main__":
    main()
