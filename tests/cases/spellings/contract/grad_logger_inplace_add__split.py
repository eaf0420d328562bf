# /// case
# title = "Full backward hooks for gradient logging meet an in-place residual addition"
# source = "https://github.com/shap/shap/issues/3565"
# outcome = "raises"
# torch_error = "is a view and is being modified inplace. This view was created inside a custom Function"
# cause = "hook-contract"
# names = ["conv2", "out", "register_full_backward_hook"]
# fix = "add the shortcut out of place"
# ///
import torch
from torch import nn
import torch.nn.functional as F

from grad_logger_inplace_add__split_parts import GradientLogger, TinyResNet, blobs


torch.manual_seed(0)
net = TinyResNet()
logger = GradientLogger(net)
optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
for step in range(40):
    img, label = blobs(32)
    loss = F.cross_entropy(net(img), label)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(step, loss.item(), {k: round(v, 4) for k, v in logger.norms.items()})
