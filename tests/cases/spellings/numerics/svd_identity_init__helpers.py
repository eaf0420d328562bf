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


def low_rank_mixer_reset_parameters(owner):
    nn.init.eye_(owner.mix)  # <- culprit


def low_rank_mixer_truncated(owner):
    u, s, vh = torch.linalg.svd(owner.mix)  # <- culprit # <- raises
    return u[:, :owner.rank] @ torch.diag(s[:owner.rank]) @ vh[:owner.rank]


def low_rank_mixer_forward(owner, x):
    return x @ owner.truncated().t()


class LowRankMixer(nn.Module):
    """Mixes channels with the best rank-k approximation of a square weight."""

    def __init__(self, channels, rank):
        super().__init__()
        self.rank = rank
        self.mix = nn.Parameter(torch.empty(channels, channels))
        self.reset_parameters()

    def reset_parameters(self):
        return low_rank_mixer_reset_parameters(self)

    def truncated(self):
        return low_rank_mixer_truncated(self)

    def forward(self, x):
        return low_rank_mixer_forward(self, x)


def unmixer_forward(owner, x):
    return owner.readout(torch.tanh(owner.mixer(x)))


class Unmixer(nn.Module):
    def __init__(self, channels=8, rank=5):
        super().__init__()
        self.mixer = LowRankMixer(channels, rank)
        self.readout = nn.Linear(channels, 3)

    def forward(self, x):
        return unmixer_forward(self, x)


def recordings(n, mixing):
    sources = torch.randn(n, 3)
    return sources @ mixing + 0.05 * torch.randn(n, 8), sources


def finish_batch(loss, optimizer, step):
    loss.backward()
    optimizer.step()
    if step % 20 == 0:
        print(step, loss.item())


def begin_batch(mixing, model, optimizer):
    x, sources = recordings(64, mixing)
    loss = (model(x) - sources).pow(2).mean()
    optimizer.zero_grad()
    return loss


def main():
    torch.manual_seed(0)
    mixing = torch.randn(3, 8)
    model = Unmixer()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(120):
        loss = begin_batch(mixing, model, optimizer)
        finish_batch(loss, optimizer, step)


if __name__ == "__main__":
    main()
