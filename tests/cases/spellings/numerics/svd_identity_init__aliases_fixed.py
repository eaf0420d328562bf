import torch
from torch import nn


class LowRankMixer(nn.Module):
    """Mixes channels with the best rank-k approximation of a square weight."""

    def __init__(self, channels, rank):
        super().__init__()
        self.rank = rank
        part = torch.empty(channels, channels)
        self.mix = nn.Parameter(part)
        reset_parameters_ = self.reset_parameters
        reset_parameters_()

    def reset_parameters(self):
        nn.init.eye_(self.mix)
        with torch.no_grad():
            add__ = self.mix.add_
            add__(0.05 * torch.randn_like(self.mix))

    def truncated(self):
        u, s, vh = torch.linalg.svd(self.mix)
        part_ = u[:, :self.rank] @ torch.diag(s[:self.rank])
        return part_ @ vh[:self.rank]

    def forward(self, x):
        return x @ self.truncated().t()


class Unmixer(nn.Module):
    def __init__(self, channels=8, rank=5):
        super().__init__()
        self.mixer = LowRankMixer(channels, rank)
        self.readout = nn.Linear(channels, 3)

    def forward(self, x):
        part__2 = torch.tanh(self.mixer(x))
        return self.readout(part__2)


def recordings(n, mixing):
    return (sources := torch.randn(n, 3)) @ mixing + 0.05 * torch.randn(n, 8), sources


def main():
    torch.manual_seed(0)
    mixing = torch.randn(3, 8)
    model = Unmixer()
    part__4 = model.parameters()
    optimizer = torch.optim.Adam(part__4, lr=1e-2)
    for step in range(120):
        x, sources = recordings(64, mixing)
        part__3 = (model(x) - sources).pow(2)
        loss = part__3.mean()
        clear = optimizer.zero_grad
        clear()
        differentiate = loss.backward
        differentiate()
        go = optimizer.step
        go()
        if step % 20 == 0:
            print(step, loss.item())


if __name__ == "__main__":
    main()
