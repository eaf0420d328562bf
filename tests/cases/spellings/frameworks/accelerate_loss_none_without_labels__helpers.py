# /// case
# title = "The batch has 'label' instead of 'labels', so the model returns no loss"
# source = "https://github.com/huggingface/accelerate/issues/1366"
# outcome = "raises"
# torch_error = "unsupported operand type(s) for /: 'NoneType' and 'int'"
# cause = "transformers-no-loss"
# names = ["label", "labels", "loss"]
# fix = "pass the targets under the name 'labels'"
# needs = ["accelerate", "transformers"]
# ///
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


def finish_batch(accelerator, outputs, optimizer):
    accelerator.backward(outputs.loss)  # <- raises
    optimizer.step()
    optimizer.zero_grad()


def begin_batch(model, batch):
    outputs = forward(model, batch)
    return outputs


def main():
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    config = DistilBertConfig(vocab_size=40, dim=32, n_layers=1, n_heads=2, hidden_dim=64,
                              max_position_embeddings=16, num_labels=2)
    model = DistilBertForSequenceClassification(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    loader = DataLoader(encode(), batch_size=16, shuffle=True, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    model.train()
    for epoch in range(6):
        for batch in loader:
            outputs = begin_batch(model, batch)
            finish_batch(accelerator, outputs, optimizer)
        accelerator.print(f"epoch {epoch} loss {outputs.loss.item():.3f}")


if __name__ == "__main__":
    main()
