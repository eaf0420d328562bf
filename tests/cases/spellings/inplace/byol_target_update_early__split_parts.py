import copy

import torch
import torch.nn as nn
import torch.nn.functional as F


def update_moving_average(ma_model, current_model, beta=0.95):
    with torch.no_grad():
        for ma_p, p in zip(ma_model.parameters(), current_model.parameters()):
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
