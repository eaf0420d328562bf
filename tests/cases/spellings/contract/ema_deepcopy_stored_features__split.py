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

from ema_deepcopy_stored_features__split_parts import Detector, ModelEMA, scenes


def main():
    torch.manual_seed(0)
    model = Detector()
    ema = ModelEMA(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(50):
        img, target = scenes(16)
        loss = F.binary_cross_entropy_with_logits(model(img), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ema.update(model)
        if step % 10 == 0:
            print(step, loss.item(), model.backbone.last_features.mean().item())


if __name__ == "__main__":
    main()
