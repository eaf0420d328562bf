import torch

torch.manual_seed(0)


def noisy(x):
    return (x + 0.1 * torch.randn(4)).pow(2).sum()


inputs = torch.randn(8, 4, requires_grad=True)
loss = torch.func.vmap(noisy)(inputs).mean()
loss.backward()
