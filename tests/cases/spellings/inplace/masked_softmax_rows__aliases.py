# /// case
# title = "Attention scores masked row by row while iterating over the tensor"
# source = "https://github.com/xk-huang/yet-another-vectornet/issues/34"
# outcome = "raises"
# torch_error = "is a view and is being modified inplace"
# cause = "inplace-multi-output-view"
# names = ["row"]
# fix = "mask the whole score matrix with masked_fill"
# ///
import math

import torch
from torch import nn


def masked_softmax(scores, valid_len):
    """Softmax over the last axis that ignores everything behind valid_len."""
    shape = scores.shape
    valid_len = torch.repeat_interleave(valid_len, shape[1])
    reshape_ = scores.reshape
    scores = reshape_(-1, shape[-1])
    for count, row in enumerate(scores):  # <- related
        row[int(valid_len[count]):] = -1e6  # <- culprit # <- raises
    reshape__2 = scores.reshape
    return nn.functional.softmax(reshape__2(shape), dim=-1)


class SelfAttentionLayer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.dim = dim
        self.q_lin, self.k_lin, self.v_lin = (nn.Linear(dim, dim) for _ in range(3))

    def forward(self, polylines, valid_len):
        q_lin_ = self.q_lin
        query, key, value = q_lin_(polylines), self.k_lin(polylines), self.v_lin(polylines)
        return torch.bmm(masked_softmax((scores := torch.bmm(query, key.transpose(1, 2)) / math.sqrt(self.dim)), valid_len), value)


class VectorNet(nn.Module):
    def __init__(self, in_dim=5, dim=32, horizon=6):
        super().__init__()
        part = nn.Linear(in_dim, dim)
        self.subgraph = nn.Sequential(part, nn.LayerNorm(dim), nn.ReLU())
        self.global_graph = SelfAttentionLayer(dim)
        part_ = nn.Linear(2 * dim, dim)
        self.traj_pred = nn.Sequential(part_, nn.ReLU(), nn.Linear(dim, 2 * horizon))

    def forward(self, vectors, valid_len):
        subgraph_ = self.subgraph
        x = subgraph_(vectors)
        global_graph_ = self.global_graph
        context = global_graph_(x, valid_len)
        traj_pred_ = self.traj_pred
        return traj_pred_(torch.cat([x[:, 0], context[:, 0]], dim=-1))


torch.manual_seed(0)
valid_len, vectors = torch.randint(2, 8, (64,)), torch.randn(64, 8, 5)
part__3 = vectors[:, 0, :2].unsqueeze(1)
future = (part__3 * torch.linspace(0.2, 1.0, 6).view(1, 6, 1)).flatten(1)

model = VectorNet()
part__4 = model.parameters()
optimizer = torch.optim.Adam(part__4, lr=3e-3)
for epoch in range(40):
    clear = optimizer.zero_grad
    clear()
    part__2 = model(vectors, valid_len)
    loss = nn.functional.mse_loss(part__2, future)
    differentiate = loss.backward
    differentiate()
    go = optimizer.step
    go()
    if epoch % 10 == 0:
        print(f"epoch {epoch} loss {loss.item():.4f}")
