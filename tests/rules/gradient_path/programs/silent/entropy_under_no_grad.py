# expect: GG308
# names: entropy
import torch
from torch import nn

torch.manual_seed(0)
policy = nn.Linear(4, 3)
optimizer = torch.optim.Adam(policy.parameters())


def entropy(logits):
    with torch.no_grad():  # BUG
        p = logits.softmax(-1)
        return -(p * p.log()).sum(-1).mean()


for _ in range(4):
    states, actions, returns = torch.randn(16, 4), torch.randint(0, 3, (16,)), torch.randn(16)
    logits = policy(states)
    chosen = logits.log_softmax(-1).gather(1, actions[:, None]).squeeze(1)
    loss = -(chosen * returns).mean() - 0.01 * entropy(logits)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
