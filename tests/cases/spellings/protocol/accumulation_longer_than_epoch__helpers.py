# /// case
# title = "Fine-tuning never steps: an epoch has fewer batches than gradient_accumulation_steps"
# source = "https://github.com/huggingface/transformers/issues/2995"
# outcome = "silent"
# torch_error = ""
# cause = "backward-without-step"
# names = ["optimizer", "gradient_accumulation_steps"]
# fix = "count batches over epochs, or step at the end of the epoch as well"
# ///
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


def tiny_bert_forward(owner, input_ids):
    positions = torch.arange(input_ids.size(1))
    hidden = owner.encoder(owner.token(input_ids) + owner.position(positions))
    return owner.classifier(hidden.mean(1))


class TinyBert(nn.Module):
    def __init__(self, vocab=40, dim=32, n_labels=2):
        super().__init__()
        self.token = nn.Embedding(vocab, dim)
        self.position = nn.Embedding(12, dim)
        layer = nn.TransformerEncoderLayer(dim, nhead=4, dim_feedforward=64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers=1)
        self.classifier = nn.Linear(dim, n_labels)

    def forward(self, input_ids):
        return tiny_bert_forward(self, input_ids)


def finish_batch(loss, gradient_accumulation_steps, epoch_loss, step, model, optimizer):
    (loss / gradient_accumulation_steps).backward()  # <- related
    epoch_loss += loss.item()
    if (step + 1) % gradient_accumulation_steps == 0:  # <- culprit
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        model.zero_grad()
    return epoch_loss


def begin_batch(model, input_ids, labels):
    loss = F.cross_entropy(model(input_ids), labels)
    return loss


def train(model, dataset, epochs=10, batch_size=16, gradient_accumulation_steps=8):
    loader = DataLoader(dataset, batch_size=batch_size, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model.zero_grad()
    for epoch in range(epochs):
        epoch_loss = 0.0
        for step, (input_ids, labels) in enumerate(loader):
            loss = begin_batch(model, input_ids, labels)
            epoch_loss = finish_batch(loss, gradient_accumulation_steps, epoch_loss, step, model, optimizer)
        print(f"epoch {epoch}: loss {epoch_loss / len(loader):.4f}")


if __name__ == "__main__":
    torch.manual_seed(0)
    ids = torch.randint(0, 40, (96, 12))
    labels = (ids < 10).any(dim=1).long() * (ids[:, 0] < 20).long()
    train(TinyBert(), TensorDataset(ids, labels))
