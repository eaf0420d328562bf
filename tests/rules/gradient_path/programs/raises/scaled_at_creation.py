# expect: GG307
# names: w
import torch

torch.manual_seed(0)
x, y = torch.randn(30, 3), torch.randn(30)
w = torch.randn(3, requires_grad=True) * 0.1  # BUG
lr = 0.1
loss = ((x @ w - y) ** 2).mean()
loss.backward()
with torch.no_grad():
    w -= lr * w.grad
