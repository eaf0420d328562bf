# expect: GG308
# names: auxiliary
import torch
from torch import nn


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 8), nn.ReLU())
        self.main = nn.Linear(8, 2)
        self.side = nn.Linear(8, 1)

    def losses(self, x, y, depth):
        h = self.body(x)
        main = nn.functional.cross_entropy(self.main(h), y)
        auxiliary = nn.functional.mse_loss(self.side(h), depth).detach()  # BUG
        return main, auxiliary


torch.manual_seed(0)
model = TwoHeads()
optimizer = torch.optim.Adam(model.parameters())
for _ in range(4):
    main, auxiliary = model.losses(torch.randn(8, 5), torch.randint(0, 2, (8,)), torch.randn(8, 1))
    total = main
    total += 0.3 * auxiliary
    optimizer.zero_grad()
    total.backward()
    optimizer.step()
