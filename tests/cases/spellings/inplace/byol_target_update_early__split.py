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

from byol_target_update_early__split_parts import BYOL, augment, update_moving_average


torch.manual_seed(0)
samples = torch.randn(8, 20)[torch.randint(0, 8, (256,))] + 0.2 * torch.randn(256, 20)
learner = BYOL()
opt = torch.optim.Adam(list(learner.online_encoder.parameters()) + list(learner.predictor.parameters()), lr=2e-3)

for step in range(50):
    batch = samples[torch.randperm(256)[:64]]
    loss = learner(augment(batch), augment(batch))
    update_moving_average(learner.target_encoder, learner.online_encoder)  # <- culprit
    opt.zero_grad()
    loss.backward()  # <- raises
    opt.step()
    if step % 10 == 0:
        print(f"step {step} loss {loss.item():.4f}")
