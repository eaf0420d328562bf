# /// case
# title = "Model remembers its last feature map, so it cannot be deep-copied for the EMA"
# source = "https://github.com/ultralytics/yolov5/issues/9623"
# outcome = "raises"
# torch_error = "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol"
# cause = "deepcopy-nonleaf"
# names = ["last_features", "deepcopy"]
# fix = "store a detached copy of the features"
# ///
import copy
import torch
from torch import nn
import torch.nn.functional as F


def backbone_forward(owner, img):
    feats = F.relu(owner.conv2(F.relu(owner.conv1(img))))
    owner.last_features = feats  # <- culprit
    return feats


class Backbone(nn.Module):
    def __init__(self, width=12):
        super().__init__()
        self.conv1 = nn.Conv2d(1, width, 3, stride=2, padding=1)
        self.conv2 = nn.Conv2d(width, width, 3, stride=2, padding=1)
        self.last_features = None

    def forward(self, img):
        return backbone_forward(self, img)


def detector_forward(owner, img):
    return owner.head(owner.backbone(img))


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = Backbone()
        self.head = nn.Conv2d(12, 1, 1)
        self.stride = 16 // self.forward(torch.zeros(1, 1, 16, 16)).shape[-1]

    def forward(self, img):
        return detector_forward(self, img)


class ModelEMA:
    def __init__(self, model, decay=0.9):
        self.ema = copy.deepcopy(model).eval()  # <- raises
        self.decay = decay
        for p in self.ema.parameters():
            p.requires_grad_(False)

    @torch.no_grad()
    def update(self, model):
        for e, p in zip(self.ema.parameters(), model.parameters()):
            e.lerp_(p, 1 - self.decay)


def scenes(n):
    img = 0.1 * torch.randn(n, 1, 16, 16)
    target = torch.zeros(n, 1, 4, 4)
    for k in range(n):
        r, c = torch.randint(0, 4, (2,)).tolist()
        img[k, 0, 4 * r:4 * r + 4, 4 * c:4 * c + 4] += 1.0
        target[k, 0, r, c] = 1.0
    return img, target


def finish_batch(loss, optimizer, ema, model, step):
    loss.backward()
    optimizer.step()
    ema.update(model)
    if step % 10 == 0:
        print(step, loss.item(), model.backbone.last_features.mean().item())


def begin_batch(model, optimizer):
    img, target = scenes(16)
    loss = F.binary_cross_entropy_with_logits(model(img), target)
    optimizer.zero_grad()
    return loss


def main():
    torch.manual_seed(0)
    model = Detector()
    ema = ModelEMA(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(50):
        loss = begin_batch(model, optimizer)
        finish_batch(loss, optimizer, ema, model, step)


if __name__ == "__main__":
    main()
