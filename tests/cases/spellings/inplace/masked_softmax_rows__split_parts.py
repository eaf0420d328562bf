import math

import torch
from torch import nn


def masked_softmax(scores, valid_len):
    """Softmax over the last axis that ignores everything behind valid_len."""
    shape = scores.shape
    valid_len = torch.repeat_interleave(valid_len, shape[1])
    scores = scores.reshape(-1, shape[-1])
    for count, row in enumerate(scores):  # <- related
        row[int(valid_len[count]):] = -1e6  # <- culprit # <- raises
    return nn.functional.softmax(scores.reshape(shape), dim=-1)


class SelfAttentionLayer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.dim = dim
        self.q_lin, self.k_lin, self.v_lin = (nn.Linear(dim, dim) for _ in range(3))

    def forward(self, polylines, valid_len):
        query, key, value = self.q_lin(polylines), self.k_lin(polylines), self.v_lin(polylines)
        scores = torch.bmm(query, key.transpose(1, 2)) / math.sqrt(self.dim)
        return torch.bmm(masked_softmax(scores, valid_len), value)


class VectorNet(nn.Module):
    def __init__(self, in_dim=5, dim=32, horizon=6):
        super().__init__()
        self.subgraph = nn.Sequential(nn.Linear(in_dim, dim), nn.LayerNorm(dim), nn.ReLU())
        self.global_graph = SelfAttentionLayer(dim)
        self.traj_pred = nn.Sequential(nn.Linear(2 * dim, dim), nn.ReLU(), nn.Linear(dim, 2 * horizon))

    def forward(self, vectors, valid_len):
        x = self.subgraph(vectors)
        context = self.global_graph(x, valid_len)
        return self.traj_pred(torch.cat([x[:, 0], context[:, 0]], dim=-1))
