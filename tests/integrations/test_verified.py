"""Callbacks with `verify=True`, in programs of their own: a trial starts the script anew."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

MODEL = """
    import torch
    from torch import nn
    torch.manual_seed(0)

    class Net(BASE):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(6, 4), nn.Linear(4, 2)

        def forward(self, x):
            h = torch.sigmoid(self.first(x))
            BUG
            return self.last(h)
"""
TRAINER = """
    import transformers
    from gradguard.integrations.transformers import GradGuardCallback

    class Classifier(Net):
        def forward(self, x, labels):
            return {"loss": nn.functional.cross_entropy(super().forward(x), labels)}

    trainer = transformers.Trainer(
        model=Classifier(),
        args=transformers.TrainingArguments(
            output_dir="out", per_device_train_batch_size=1, num_train_epochs=1, report_to=[], use_cpu=True, disable_tqdm=True,
            save_strategy="epoch", logging_strategy="no",
        ),
        train_dataset=[{"x": torch.randn(6), "labels": i % 2} for i in range(24)],
        callbacks=[GradGuardCallback(verify=True, report="run.jsonl")],
    )
    trainer.train()
"""
LIGHTNING = """
    import lightning
    from torch.utils.data import DataLoader
    from gradguard.integrations.lightning import GradGuardCallback

    class Module(Net):
        def training_step(self, batch, index):
            x, y = batch
            loss = nn.functional.cross_entropy(self(x), y)
            self.log("loss", loss)
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", enable_progress_bar=False, enable_model_summary=False,
        callbacks=[GradGuardCallback(verify=True, report="run.jsonl")],
    )
    trainer.fit(Module(), DataLoader([(torch.randn(6), i % 2) for i in range(24)], 1))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bug", "code", "repaired"),
    [("h += 1", "GG101", "h = h + 1"), ("h = h.detach()", "GG605", None)],
    ids=["raised", "silent"],
)
@pytest.mark.parametrize(
    ("base", "program"), [("nn.Module", TRAINER), ("__import__('lightning').LightningModule", LIGHTNING)], ids=["transformers", "lightning"]
)
def test_a_callback_verifies(base: str, program: str, bug: str, code: str, repaired: str | None, tmp_path: Path) -> None:
    for package in ("transformers", "accelerate") if program is TRAINER else ("lightning",):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"needs {package}")
    text = textwrap.dedent(MODEL).replace("BASE", base).replace("BUG", bug) + textwrap.dedent(program)
    (tmp_path / "train.py").write_text(text)
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "NO_COLOR": "1", "COLUMNS": "200"}
    )
    assert done.returncode == (1 if code == "GG101" else 0), done.stderr
    (record,) = map(json.loads, (tmp_path / "run.jsonl").read_text().splitlines())
    assert record["code"] == code
    fix = record["fixes"][0]
    assert (fix["verified"]["verdict"], done.stderr.count("trying its fix")) == ("verified", 1), done.stderr
    assert fix["verified"]["steps"] >= 6 and (repaired is None or f"+        {repaired}\n" in fix["patch"])
    assert (tmp_path / "train.py").read_text() == text
