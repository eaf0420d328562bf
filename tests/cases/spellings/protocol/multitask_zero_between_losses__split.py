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

from multitask_zero_between_losses__split_parts import SceneNet, scenes


torch.manual_seed(0)
model = SceneNet()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
seg_criterion = nn.CrossEntropyLoss()
depth_criterion = nn.L1Loss()

for step in range(120):
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
