# /// case
# title = "SVD of a weight that starts as the identity has equal singular values"
# source = "https://github.com/pytorch/pytorch/issues/49886"
# outcome = "raises"
# torch_error = "linalg.svd: The algorithm failed to converge because the input matrix contained non-finite values"
# cause = "nonfinite-backward"
# names = ["svd", "mix", "eye_"]
# fix = "break the degeneracy: perturb the identity initialisation"
# ///
import torch
from torch import nn


class LowRankMixer(nn.Module):
    """Mixes channels with the best rank-k approximation of a square weight."""

    def __init__(self, channels, rank):
        super().__init__()
        self.rank = rank
        self.mix = nn.Parameter(torch.empty(channels, channels))
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.eye_(self.mix)  # <- culprit

    def truncated(self):
        u, s, vh = torch.linalg.svd(self.mix)  # <- culprit # <- raises
        return u[:, :self.rank] @ torch.diag(s[:self.rank]) @ vh[:self.rank]

    def forward(self, x):
        return x @ self.truncated().t()


class Unmixer(nn.Module):
    def __init__(self, channels=8, rank=5):
        super().__init__()
        self.mixer = LowRankMixer(channels, rank)
        self.readout = nn.Linear(channels, 3)

    def forward(self, x):
        return self.readout(torch.tanh(self.mixer(x)))


def recordings(n, mixing):
    sources = torch.randn(n, 3)
    return sources @ mixing + 0.05 * torch.randn(n, 8), sources


def main():
    torch.manual_seed(0)
    mixing = torch.randn(3, 8)
    model = Unmixer()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    source = iter(range(120))
    while (item_2 := next(source, None)) is not None:
        step = item_2
        x, sources = recordings(64, mixing)
        loss = (model(x) - sources).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(step, loss.item())


if __name__ == "__main__":
    main()
