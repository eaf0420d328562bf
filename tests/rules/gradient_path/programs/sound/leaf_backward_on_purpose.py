import torch

scale = torch.tensor(2.0, requires_grad=True)
scale.backward()
assert scale.grad.item() == 1.0
point = torch.tensor([1.0, 2.0], requires_grad=True)
for _ in range(3):
    energy = (point**2).sum()
    step = torch.autograd.grad(energy, point)[0]
    point = (point - 0.1 * step).detach().requires_grad_(True)
