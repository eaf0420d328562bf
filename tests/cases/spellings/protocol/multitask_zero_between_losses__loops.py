# /// case
# title = "Segmentation head never learns: its gradients are cleared before the depth loss's backward"
# source = "https://github.com/juliusfrost/dreamer-pytorch/pull/66"
# outcome = "silent"
# torch_error = ""
# cause = "zeroed-before-step"
# names = ["optimizer", "seg_head"]
# fix = "remove the second optimizer.zero_grad(), clear once per step"
# ///
import torch
import torch.nn as nn


class SceneNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(),
            nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(),
        )
        self.seg_head = nn.Conv2d(16, 2, 1)
        self.depth_head = nn.Conv2d(16, 1, 1)

    def forward(self, image):
        features = self.trunk(image)
        return self.seg_head(features), self.depth_head(features)


def scenes(n):
    image = torch.rand(n, 3, 12, 12)
    mask = (image[:, 0] > image[:, 1]).long()
    depth = image.mean(1, keepdim=True)
    return image, mask, depth


torch.manual_seed(0)
model = SceneNet()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
seg_criterion = nn.CrossEntropyLoss()
depth_criterion = nn.L1Loss()

source = iter(range(120))
while (item_2 := next(source, None)) is not None:
    step = item_2
    image, mask, depth = scenes(8)
    seg_pred, depth_pred = model(image)

    optimizer.zero_grad()
    seg_loss = seg_criterion(seg_pred, mask)
    seg_loss.backward(retain_graph=True)  # <- related

    optimizer.zero_grad()  # <- culprit
    depth_loss = depth_criterion(depth_pred, depth)
    depth_loss.backward()
    optimizer.step()

    if step % 30 == 0 or step == 119:
        print(f"{step:3d} seg {seg_loss.item():.3f} depth {depth_loss.item():.3f}")
