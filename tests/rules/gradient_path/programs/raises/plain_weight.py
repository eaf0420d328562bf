# expect: GG303
# names: weight
import torch

torch.manual_seed(0)
features, target = torch.randn(20, 3), torch.randn(20)
weight = torch.zeros(3)  # BUG
for _ in range(3):
    error = features @ weight - target
    loss = (error**2).mean()
    loss.backward()
    with torch.no_grad():
        weight -= 0.1 * weight.grad
        weight.grad.zero_()
