import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import DistilBertConfig, DistilBertForSequenceClassification


def encode(n=128, length=10):
    rows = []
    for _ in range(n):
        ids = torch.randint(2, 40, (length,))
        mask = torch.ones(length, dtype=torch.long)
        sentiment = int((ids < 20).float().mean() > 0.5)
        rows.append({"input_ids": ids, "attention_mask": mask, "label": sentiment})
    return rows


def collate(rows, keys=("input_ids", "attention_mask")):
    batch = {key: torch.stack([row[key] for row in rows]) for key in keys}
    batch["label"] = torch.tensor([row["label"] for row in rows])  # <- culprit
    return batch


def forward(model, batch):
    accepted = ("input_ids", "attention_mask", "labels")
    return model(**{k: v for k, v in batch.items() if k in accepted})  # <- related
