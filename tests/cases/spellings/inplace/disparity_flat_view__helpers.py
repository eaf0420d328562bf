# /// case
# title = "Small disparities overwritten through a flattened view of the sigmoid's output"
# source = "https://github.com/kail8/UnsupDIS-pytorch/issues/26"
# outcome = "raises"
# torch_error = "has been modified by an inplace operation"
# cause = "inplace-modified-saved-tensor"
# names = ["flat", "disp"]
# fix = "disp = disp.clamp(min=min_disp)"
# ///
import torch
import torch.nn as nn
import torch.nn.functional as F

EPS = 0.05


def disp_to_depth(disp, focal_baseline=1.0, min_disp=EPS):
    # no division by zero in the sky
    flat = disp.view(-1)
    flat[flat < min_disp] = min_disp  # <- culprit
    return focal_baseline / disp


def reconstruction_loss(disp, depth_gt, valid):
    depth = disp_to_depth(disp)
    error = (depth.log() - depth_gt.log()).abs()
    return error[valid].mean()


def smoothness_loss(disp):
    dx = (disp[..., :, 1:] - disp[..., :, :-1]).abs().mean()
    dy = (disp[..., 1:, :] - disp[..., :-1, :]).abs().mean()
    return dx + dy


def disp_net_forward(owner, image):
    x = F.elu(owner.mid(F.elu(owner.enc(image))))
    return torch.sigmoid(owner.disp_head(x))  # <- related


class DispNet(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.enc = nn.Conv2d(3, width, 3, padding=1)
        self.mid = nn.Conv2d(width, width, 3, padding=1)
        self.disp_head = nn.Conv2d(width, 1, 3, padding=1)

    def forward(self, image):
        return disp_net_forward(self, image)


torch.manual_seed(0)
image = torch.rand(8, 3, 16, 16)
depth_gt = 1.0 / (0.1 + 0.8 * image.mean(dim=1, keepdim=True))
valid = torch.rand_like(depth_gt) > 0.3

model = DispNet()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)


def finish_batch(loss, optimizer, step):
    loss.backward()  # <- raises
    optimizer.step()
    if step % 10 == 0:
        print(f"step {step} loss {loss.item():.4f}")


def begin_batch(model, image, depth_gt, valid, optimizer):
    disp = model(image)
    loss = reconstruction_loss(disp, depth_gt, valid) + 0.01 * smoothness_loss(disp)
    optimizer.zero_grad()
    return loss
for step in range(40):
    loss = begin_batch(model, image, depth_gt, valid, optimizer)
    finish_batch(loss, optimizer, step)
