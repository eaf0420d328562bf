import copy

import torch
import torch.nn as nn
import torch.nn.functional as F


def update_moving_average(ma_model, current_model, beta=0.95):
    with torch.no_grad():
        for ma_p, p in zip(ma_model.parameters(), current_model.parameters()):
            mul__ = ma_p.mul_
            mul__(beta).add_(p, alpha=1 - beta)


def regression_loss(x, y):
    return 2 - 2 * F.cosine_similarity(x, y, dim=-1)


class BYOL(nn.Module):
    def __init__(self, in_dim=20, hidden=64, dim=16):
        super().__init__()
        self.online_encoder = nn.Sequential(
            nn.Linear(in_dim, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, dim))
        part = nn.Linear(dim, hidden)
        self.predictor = nn.Sequential(part, nn.ReLU(), nn.Linear(hidden, dim))
        self.target_encoder = copy.deepcopy(self.online_encoder)

    def forward(self, view_one, view_two):
        pred_one, pred_two = self.predictor(self.online_encoder(view_one)), self.predictor(self.online_encoder(view_two))
        target_encoder_ = self.target_encoder
        target_one = target_encoder_(view_one)
        target_encoder__2 = self.target_encoder
        target_two = target_encoder__2(view_two)
        part_ = regression_loss(pred_one, target_two)
        return (part_ + regression_loss(pred_two, target_one)).mean()


def augment(x):
    part__2 = x * (torch.rand_like(x) > 0.1)
    return part__2 + 0.1 * torch.randn_like(x)


torch.manual_seed(0)
part__3 = torch.randn(8, 20)
samples = part__3[torch.randint(0, 8, (256,))] + 0.2 * torch.randn(256, 20)
learner = BYOL()
part__4 = list(learner.online_encoder.parameters()) + list(learner.predictor.parameters())
opt = torch.optim.Adam(part__4, lr=2e-3)

for step in range(50):
    loss = learner(augment((batch := samples[torch.randperm(256)[:64]])), augment(batch))
    clear = opt.zero_grad
    clear()
    differentiate = loss.backward
    differentiate()
    go = opt.step
    go()
    update_moving_average(learner.target_encoder, learner.online_encoder)
    if step % 10 == 0:
        print(f"step {step} loss {loss.item():.4f}")
