# /// case
# title = "BYOL's target encoder gets its moving-average update between the forward and the backward pass"
# source = "https://github.com/lucidrains/byol-pytorch/issues/91"
# outcome = "raises"
# torch_error = "has been modified by an inplace operation"
# cause = "inplace-optimizer-step"
# names = ["target_encoder", "update_moving_average"]
# fix = "update the target after optimizer.step()"
# ///
import copy

import torch
import torch.nn as nn
import torch.nn.functional as F


def update_moving_average(ma_model, current_model, beta=0.95):
    with torch.no_grad():
        source = iter(zip(ma_model.parameters(), current_model.parameters()))
        while (item_2 := next(source, None)) is not None:
            ma_p, p = item_2
            ma_p.mul_(beta).add_(p, alpha=1 - beta)  # <- culprit


def regression_loss(x, y):
    return 2 - 2 * F.cosine_similarity(x, y, dim=-1)


class BYOL(nn.Module):
    def __init__(self, in_dim=20, hidden=64, dim=16):
        super().__init__()
        self.online_encoder = nn.Sequential(
            nn.Linear(in_dim, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, dim))
        self.predictor = nn.Sequential(nn.Linear(dim, hidden), nn.ReLU(), nn.Linear(hidden, dim))
        self.target_encoder = copy.deepcopy(self.online_encoder)

    def forward(self, view_one, view_two):
        pred_one = self.predictor(self.online_encoder(view_one))
        pred_two = self.predictor(self.online_encoder(view_two))
        target_one = self.target_encoder(view_one)  # <- related
        target_two = self.target_encoder(view_two)
        return (regression_loss(pred_one, target_two) + regression_loss(pred_two, target_one)).mean()


def augment(x):
    return x * (torch.rand_like(x) > 0.1) + 0.1 * torch.randn_like(x)


torch.manual_seed(0)
samples = torch.randn(8, 20)[torch.randint(0, 8, (256,))] + 0.2 * torch.randn(256, 20)
learner = BYOL()
opt = torch.optim.Adam(list(learner.online_encoder.parameters()) + list(learner.predictor.parameters()), lr=2e-3)

source_2 = iter(range(50))
while (item_3 := next(source_2, None)) is not None:
    step = item_3
    batch = samples[torch.randperm(256)[:64]]
    loss = learner(augment(batch), augment(batch))
    update_moving_average(learner.target_encoder, learner.online_encoder)  # <- culprit
    opt.zero_grad()
    loss.backward()  # <- raises
    opt.step()
    if step % 10 == 0:
        print(f"step {step} loss {loss.item():.4f}")
