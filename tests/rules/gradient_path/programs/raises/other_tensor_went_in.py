# expect: GG306
# names: adversarial
import torch
from torch import nn

model = nn.Linear(4, 3)
images, labels = torch.rand(6, 4), torch.randint(0, 3, (6,))
adversarial = images.clone().requires_grad_(True)
loss = nn.functional.cross_entropy(model(images), labels)
step = torch.autograd.grad(loss, adversarial)[0]  # BUG
