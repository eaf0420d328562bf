# /// case
# title = "Linear probe is trained on features extracted in inference mode"
# source = "https://github.com/facebookresearch/dinov2/issues/472"
# outcome = "raises"
# torch_error = "Inference tensors cannot be saved for backward"
# cause = "inference-tensor"
# names = ["patch_features", "extract_features"]
# fix = "extract with torch.no_grad() instead of inference_mode"
# ///
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)


def patch_encoder_forward(owner, images):
    tokens = owner.patchify(images).flatten(2).transpose(1, 2)
    return owner.block(tokens)


class PatchEncoder(nn.Module):
    def __init__(self, patch=4, dim=32):
        super().__init__()
        self.patchify = nn.Conv2d(3, dim, patch, stride=patch)
        self.block = nn.TransformerEncoderLayer(dim, 4, 64, dropout=0.0, batch_first=True)

    def forward(self, images):
        return patch_encoder_forward(self, images)


def depth_head_forward(owner, tokens):
    return owner.regress(owner.norm(tokens)).squeeze(-1)  # <- raises


class DepthHead(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.regress = nn.Linear(dim, 1)

    def forward(self, tokens):
        return depth_head_forward(self, tokens)


@torch.inference_mode()  # <- culprit
def extract_features(encoder, images):
    return encoder(images)  # <- related


def scene(n=16):
    depth = torch.rand(n, 1, 4, 4)
    images = F.interpolate(depth, scale_factor=4).expand(-1, 3, -1, -1)
    return images + 0.05 * torch.randn_like(images), depth.flatten(1)


encoder = PatchEncoder().eval()
head = DepthHead()
optimizer = torch.optim.Adam(head.parameters(), lr=1e-2)


def finish_batch(loss, optimizer, step):
    loss.backward()
    optimizer.step()
    if step % 30 == 0:
        print(f"step {step} loss {loss.item():.5f}")


def begin_batch(encoder, head, optimizer):
    images, depth = scene()
    patch_features = extract_features(encoder, images)  # <- related
    loss = F.mse_loss(head(patch_features), depth)
    optimizer.zero_grad()
    return loss
for step in range(150):
    loss = begin_batch(encoder, head, optimizer)
    finish_batch(loss, optimizer, step)
