import torch
from torch import nn
import torch.nn.functional as F

from inplace_scale_unmarked__split_fixed_parts import FaceNet


def main():
    torch.manual_seed(0)
    centres = torch.randn(6, 20)
    net = FaceNet()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    for step in range(80):
        label = torch.randint(0, 6, (32,))
        x = centres[label] + 0.7 * torch.randn(32, 20)
        loss = F.cross_entropy(net(x, label), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(step, loss.item())


if __name__ == "__main__":
    main()
