import math

import torch
from torch import nn


def masked_softmax(scores, valid_len):
    """Softmax over the last axis that ignores everything behind valid_len."""
    shape = scores.shape
    valid_len = torch.repeat_interleave(valid_len, shape[1])
    scores = scores.reshape(-1, shape[-1])
    padding = torch.arange(shape[-1]) >= valid_len.unsqueeze(1)
    scores = scores.masked_fill(padding, -1e6)
    return nn.functional.softmax(scores.reshape(shape), dim=-1)


def self_attention_layer_forward(owner, polylines, valid_len):
    query, key, value = owner.q_lin(polylines), owner.k_lin(polylines), owner.v_lin(polylines)
    scores = torch.bmm(query, key.transpose(1, 2)) / math.sqrt(owner.dim)
    return torch.bmm(masked_softmax(scores, valid_len), value)


class SelfAttentionLayer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.dim = dim
        self.q_lin, self.k_lin, self.v_lin = (nn.Linear(dim, dim) for _ in range(3))

    def forward(self, polylines, valid_len):
        return self_attention_layer_forward(self, polylines, valid_len)


def vector_net_forward(owner, vectors, valid_len):
    x = owner.subgraph(vectors)
    context = owner.global_graph(x, valid_len)
    return owner.traj_pred(torch.cat([x[:, 0], context[:, 0]], dim=-1))


class VectorNet(nn.Module):
    def __init__(self, in_dim=5, dim=32, horizon=6):
        super().__init__()
        self.subgraph = nn.Sequential(nn.Linear(in_dim, dim), nn.LayerNorm(dim), nn.ReLU())
        self.global_graph = SelfAttentionLayer(dim)
        self.traj_pred = nn.Sequential(nn.Linear(2 * dim, dim), nn.ReLU(), nn.Linear(dim, 2 * horizon))

    def forward(self, vectors, valid_len):
        return vector_net_forward(self, vectors, valid_len)


torch.manual_seed(0)
valid_len = torch.randint(2, 8, (64,))
vectors = torch.randn(64, 8, 5)
future = (vectors[:, 0, :2].unsqueeze(1) * torch.linspace(0.2, 1.0, 6).view(1, 6, 1)).flatten(1)

model = VectorNet()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)


def finish_batch(loss, optimizer, epoch):
    loss.backward()
    optimizer.step()
    if epoch % 10 == 0:
        print(f"epoch {epoch} loss {loss.item():.4f}")


def begin_batch(optimizer, model, vectors, valid_len, future):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(vectors, valid_len), future)
    return loss
for epoch in range(40):
    loss = begin_batch(optimizer, model, vectors, valid_len, future)
    finish_batch(loss, optimizer, epoch)
