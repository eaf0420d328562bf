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
