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
        positions = torch.arange(input_ids.size(1))
        hidden = self.encoder(self.token(input_ids) + self.position(positions))
        return self.classifier(hidden.mean(1))
