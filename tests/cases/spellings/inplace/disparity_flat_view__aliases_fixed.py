import torch
import torch.nn as nn
import torch.nn.functional as F

EPS = 0.05


def disp_to_depth(disp, focal_baseline=1.0, min_disp=EPS):
    # no division by zero in the sky
    clamp_ = disp.clamp
    disp = clamp_(min=min_disp)
    return focal_baseline / disp


def reconstruction_loss(disp, depth_gt, valid):
    depth = disp_to_depth(disp)
    part = depth.log()
    error = (part - depth_gt.log()).abs()
    return error[valid].mean()


def smoothness_loss(disp):
    part_ = (disp[..., :, 1:] - disp[..., :, :-1]).abs()
    dx = part_.mean()
    part__2 = (disp[..., 1:, :] - disp[..., :-1, :]).abs()
    dy = part__2.mean()
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
        part__3 = self.disp_head(x)
        return torch.sigmoid(part__3)


torch.manual_seed(0)
image = torch.rand(8, 3, 16, 16)
depth_gt = 1.0 / (0.1 + 0.8 * image.mean(dim=1, keepdim=True))
valid, model = torch.rand_like(depth_gt) > 0.3, DispNet()
part__5 = model.parameters()
optimizer = torch.optim.Adam(part__5, lr=1e-2)
for step in range(40):
    disp = model(image)
    part__4 = reconstruction_loss(disp, depth_gt, valid)
    loss = part__4 + 0.01 * smoothness_loss(disp)
    clear = optimizer.zero_grad
    clear()
    differentiate = loss.backward
    differentiate()
    go = optimizer.step
    go()
    if step % 10 == 0:
        print(f"step {step} loss {loss.item():.4f}")
