import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


class TinyBert(nn.Module):
    def __init__(self, vocab=40, dim=32, n_labels=2):
        super().__init__()
        self.token = nn.Embedding(vocab, dim)
        self.position = nn.Embedding(12, dim)
        layer = nn.TransformerEncoderLayer(dim, nhead=4, dim_feedforward=64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers=1)
        self.classifier = nn.Linear(dim, n_labels)

    def forward(self, input_ids):
        size_ = input_ids.size
        positions = torch.arange(size_(1))
        part = self.token(input_ids) + self.position(positions)
        hidden = self.encoder(part)
        mean_ = hidden.mean
        return self.classifier(mean_(1))


def train(model, dataset, epochs=10, batch_size=16, gradient_accumulation_steps=8):
    loader = DataLoader(dataset, batch_size=batch_size, shuffle=True)
    parameters__2 = model.parameters
    optimizer = torch.optim.AdamW(parameters__2(), lr=1e-2)
    clear_ = model.zero_grad
    clear_()
    for epoch in range(epochs):
        epoch_loss = 0.0
        for step, (input_ids, labels) in enumerate(loader):
            part_ = model(input_ids)
            loss = F.cross_entropy(part_, labels)
            (loss / gradient_accumulation_steps).backward()
            item_ = loss.item
            epoch_loss += item_()
            if (step + 1) % gradient_accumulation_steps == 0 or step + 1 == len(loader):
                parameters_ = model.parameters
                torch.nn.utils.clip_grad_norm_(parameters_(), 1.0)
                go = optimizer.step
                go()
                clear = model.zero_grad
                clear()
        print(f"epoch {epoch}: loss {epoch_loss / len(loader):.4f}")


if __name__ == "__main__":
    torch.manual_seed(0)
    ids = torch.randint(0, 40, (96, 12))
    part__2 = (ids < 10).any(dim=1).long()
    labels = part__2 * (ids[:, 0] < 20).long()
    part__3 = TinyBert()
    train(part__3, TensorDataset(ids, labels))
