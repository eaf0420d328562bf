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
    view_ = disp.view
    flat = view_(-1)
    flat[flat < min_disp] = min_disp  # <- culprit
    return focal_baseline / disp


def reconstruction_loss(disp, depth_gt, valid):
    depth = disp_to_depth(disp)
    log_ = depth.log
    error = (log_() - depth_gt.log()).abs()
    return error[valid].mean()


def smoothness_loss(disp):
    dx, dy = (disp[..., :, 1:] - disp[..., :, :-1]).abs().mean(), (disp[..., 1:, :] - disp[..., :-1, :]).abs().mean()
    return dx + dy


class DispNet(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.enc = nn.Conv2d(3, width, 3, padding=1)
        self.mid = nn.Conv2d(width, width, 3, padding=1)
        self.disp_head = nn.Conv2d(width, 1, 3, padding=1)

    def forward(self, image):
        enc_ = self.enc
        x = F.elu(self.mid(F.elu(enc_(image))))
        part = self.disp_head(x)  # <- related
        return torch.sigmoid(part)  # <- related


torch.manual_seed(0)
image = torch.rand(8, 3, 16, 16)
depth_gt = 1.0 / (0.1 + 0.8 * image.mean(dim=1, keepdim=True))
valid, model = torch.rand_like(depth_gt) > 0.3, DispNet()
part__2 = model.parameters()
optimizer = torch.optim.Adam(part__2, lr=1e-2)
for step in range(40):
    disp = model(image)
    part_ = reconstruction_loss(disp, depth_gt, valid)
    loss = part_ + 0.01 * smoothness_loss(disp)
    clear = optimizer.zero_grad
    clear()
    differentiate = loss.backward  # <- raises
    differentiate()  # <- raises
    go = optimizer.step
    go()
    if step % 10 == 0:
        print(f"step {step} loss {loss.item():.4f}")
