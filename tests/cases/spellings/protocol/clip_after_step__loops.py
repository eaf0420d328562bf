# /// case
# title = "Variational graph RNN: gradients are clipped after the optimizer has used them"
# source = "https://github.com/VGraphRNN/VGRNN/issues/4"
# outcome = "silent"
# torch_error = ""
# cause = "grad-overwritten"
# names = ["clip_grad_norm_"]
# fix = "clip between backward() and step()"
# ///
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
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
        source = iter(adjacencies)
        while (item_2 := next(source, source)) is not source:
            adj = item_2
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
    made = []
    for _ in range(T):
        made.append(torch.where(torch.rand(N_NODES, N_NODES) < 0.05, 1 - base, base))
    return made


model = GraphRNN()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
clip = 0.3
graphs = dynamic_graph()

source_2 = iter(range(100))
while (item_3 := next(source_2, None)) is not None:
    k = item_3
    optimizer.zero_grad()
    nll, kld = model(graphs)
    loss = nll + 0.05 * kld
    loss.backward()
    optimizer.step()  # <- related
    torch.nn.utils.clip_grad_norm_(model.parameters(), clip)  # <- culprit
    if k % 20 == 0:
        print(f"epoch {k} nll {nll.item():.4f} kld {kld.item():.4f}")
