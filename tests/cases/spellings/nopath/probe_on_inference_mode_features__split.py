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

from probe_on_inference_mode_features__split_parts import DepthHead, PatchEncoder, extract_features, scene

torch.manual_seed(0)


encoder = PatchEncoder().eval()
head = DepthHead()
optimizer = torch.optim.Adam(head.parameters(), lr=1e-2)
for step in range(150):
    images, depth = scene()
    patch_features = extract_features(encoder, images)  # <- related
    loss = F.mse_loss(head(patch_features), depth)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 30 == 0:
        print(f"step {step} loss {loss.item():.5f}")
