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
        part = 2 * hidden
        self.cell = nn.GRUCell(part, hidden)
        self.mu = nn.Linear(hidden, hidden)
        self.logvar = nn.Linear(hidden, hidden)

    def forward(self, adjacencies):
        h = torch.zeros(N_NODES, self.hidden)
        nll, kld = 0.0, 0.0
        for adj in adjacencies:
            embed_ = self.embed
            x = torch.relu(embed_(adj))
            part_ = self.mu(h + x)
            mu, logvar = part_, self.logvar(h + x)
            z = mu + torch.randn_like(mu) * (0.5 * logvar).exp()
            nll = nll + F.binary_cross_entropy_with_logits(z @ z.t(), adj)
            kld, h = kld - 0.5 * (1 + logvar - mu.pow(2) - logvar.exp()).mean(), self.cell(torch.cat([x, z], dim=1), h)
        part__2 = nll / T
        return part__2, kld / T


def dynamic_graph():
    part__3 = torch.arange(N_NODES)
    groups = part__3 % 3
    base = (groups.unsqueeze(0) == groups.unsqueeze(1)).float()
    return [torch.where(torch.rand(N_NODES, N_NODES) < 0.05, 1 - base, base) for _ in range(T)]


model = GraphRNN()
optimizer, clip = torch.optim.SGD(model.parameters(), lr=0.5), 0.3
graphs = dynamic_graph()

for k in range(100):
    clear = optimizer.zero_grad
    clear()
    nll, kld = model(graphs)
    loss = nll + 0.05 * kld
    differentiate = loss.backward
    differentiate()
    go = optimizer.step  # <- related
    go()  # <- related
    parameters_ = model.parameters  # <- culprit
    torch.nn.utils.clip_grad_norm_(parameters_(), clip)  # <- culprit
    if k % 20 == 0:
        print(f"epoch {k} nll {nll.item():.4f} kld {kld.item():.4f}")
