import torch
import torch.nn as nn
import torch.nn.functional as F
N_NODES, T = 12, 6


class GraphRNN(nn.Module):
    def __init__(self, hidden=16):
        super().__init__()
        self.hidden = hidden
        self.embed = nn.Linear(N_NODES, hidden)
        self.cell = nn.GRUCell(2 * hidden, hidden)
        self.mu = nn.Linear(hidden, hidden)
        self.logvar = nn.Linear(hidden, hidden)

    def forward(self, adjacencies):
        h = torch.zeros(N_NODES, self.hidden)
        nll, kld = 0.0, 0.0
        for adj in adjacencies:
            x = torch.relu(self.embed(adj))
            mu, logvar = self.mu(h + x), self.logvar(h + x)
            z = mu + torch.randn_like(mu) * (0.5 * logvar).exp()
            nll = nll + F.binary_cross_entropy_with_logits(z @ z.t(), adj)
            kld = kld - 0.5 * (1 + logvar - mu.pow(2) - logvar.exp()).mean()
            h = self.cell(torch.cat([x, z], dim=1), h)
        return nll / T, kld / T


def dynamic_graph():
    groups = torch.arange(N_NODES) % 3
    base = (groups.unsqueeze(0) == groups.unsqueeze(1)).float()
    return [torch.where(torch.rand(N_NODES, N_NODES) < 0.05, 1 - base, base) for _ in range(T)]
