import torch
import torch.nn as nn
import torch.nn.functional as F


class PatchEncoder(nn.Module):
    def __init__(self, patch=4, dim=32):
        super().__init__()
        self.patchify = nn.Conv2d(3, dim, patch, stride=patch)
        self.block = nn.TransformerEncoderLayer(dim, 4, 64, dropout=0.0, batch_first=True)

    def forward(self, images):
        tokens = self.patchify(images).flatten(2).transpose(1, 2)
        return self.block(tokens)


class DepthHead(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.regress = nn.Linear(dim, 1)

    def forward(self, tokens):
        return self.regress(self.norm(tokens)).squeeze(-1)  # <- raises


@torch.inference_mode()  # <- culprit
def extract_features(encoder, images):
    return encoder(images)  # <- related


def scene(n=16):
    depth = torch.rand(n, 1, 4, 4)
    images = F.interpolate(depth, scale_factor=4).expand(-1, 3, -1, -1)
    return images + 0.05 * torch.randn_like(images), depth.flatten(1)
