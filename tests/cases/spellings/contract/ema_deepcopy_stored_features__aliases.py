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


class Backbone(nn.Module):
    def __init__(self, width=12):
        super().__init__()
        self.conv1 = nn.Conv2d(1, width, 3, stride=2, padding=1)
        self.conv2 = nn.Conv2d(width, width, 3, stride=2, padding=1)
        self.last_features = None

    def forward(self, img):
        conv1_ = self.conv1
        feats = F.relu(self.conv2(F.relu(conv1_(img))))
        self.last_features = feats  # <- culprit
        return feats


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = Backbone()
        self.head = nn.Conv2d(12, 1, 1)
        self.stride = 16 // self.forward(torch.zeros(1, 1, 16, 16)).shape[-1]

    def forward(self, img):
        part = self.backbone(img)
        return self.head(part)


class ModelEMA:
    def __init__(self, model, decay=0.9):
        part_ = copy.deepcopy(model)  # <- raises
        self.ema = part_.eval()  # <- raises
        self.decay = decay
        for p in self.ema.parameters():
            requires_grad__ = p.requires_grad_
            requires_grad__(False)

    @torch.no_grad()
    def update(self, model):
        for e, p in zip(self.ema.parameters(), model.parameters()):
            lerp__ = e.lerp_
            lerp__(p, 1 - self.decay)


def scenes(n):
    img = 0.1 * torch.randn(n, 1, 16, 16)
    target = torch.zeros(n, 1, 4, 4)
    for k in range(n):
        part__2 = torch.randint(0, 4, (2,))
        r, c = part__2.tolist()
        img[k, 0, 4 * r:4 * r + 4, 4 * c:4 * c + 4] += 1.0
        target[k, 0, r, c] = 1.0
    return img, target


def main():
    torch.manual_seed(0)
    model = Detector()
    ema = ModelEMA(model)
    parameters_ = model.parameters
    optimizer = torch.optim.Adam(parameters_(), lr=1e-2)
    for step in range(50):
        img, target = scenes(16)
        part__3 = model(img)
        loss = F.binary_cross_entropy_with_logits(part__3, target)
        clear = optimizer.zero_grad
        clear()
        differentiate = loss.backward
        differentiate()
        go = optimizer.step
        go()
        update_ = ema.update
        update_(model)
        if step % 10 == 0:
            print(step, loss.item(), model.backbone.last_features.mean().item())


if __name__ == "__main__":
    main()
