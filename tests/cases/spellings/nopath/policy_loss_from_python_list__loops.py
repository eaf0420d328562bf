# /// case
# title = "Policy-gradient terms are packed into a new tensor with torch.tensor"
# source = "https://github.com/kengz/SLM-Lab/pull/133"
# outcome = "raises"
# torch_error = "element 0 of tensors does not require grad and does not have a grad_fn"
# cause = "detached"
# names = ["policy_loss", "torch.tensor"]
# fix = "torch.stack instead of torch.tensor"
# ///
import torch
import torch.nn as nn
from torch.distributions import Categorical

torch.manual_seed(0)


class Policy(nn.Module):
    def __init__(self, obs_dim=3, hidden=24, n_actions=2):
        super().__init__()
        self.body = nn.Linear(obs_dim, hidden)
        self.logits = nn.Linear(hidden, n_actions)

    def forward(self, obs):
        return Categorical(logits=self.logits(torch.relu(self.body(obs))))


class BalanceEnv:
    """Keep a noisy scalar near zero by pushing left or right."""

    def reset(self):
        self.x, self.v, self.t = torch.randn(()).item() * 0.5, 0.0, 0
        return self.obs()

    def obs(self):
        return torch.tensor([self.x, self.v, 1.0])

    def step(self, action):
        self.v = 0.8 * self.v + 0.2 * (2 * action - 1) + 0.02 * torch.randn(()).item()
        self.x += self.v
        self.t += 1
        return self.obs(), 1.0 - min(abs(self.x), 2.0), self.t >= 20


def discounted(rewards, gamma=0.9):
    out, running = [], 0.0
    source = iter(reversed(rewards))
    while (item_2 := next(source, source)) is not source:
        r = item_2
        running = r + gamma * running
        out.insert(0, running)
    return out


env, policy = BalanceEnv(), Policy()
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
scores = []
source_2 = iter(range(100))
while (item_3 := next(source_2, None)) is not None:
    episode = item_3
    obs, done, log_probs, rewards = env.reset(), False, [], []
    while not done:
        dist = policy(obs)
        action = dist.sample()
        log_probs.append(dist.log_prob(action))
        obs, reward, done = env.step(action.item())
        rewards.append(reward)
    returns = torch.tensor(discounted(rewards))
    returns = (returns - returns.mean()) / (returns.std() + 1e-6)
    made = []
    for lp, ret in zip(log_probs, returns):  # <- culprit
        made.append(-lp * ret)  # <- culprit
    policy_loss = torch.tensor(made).sum()  # <- culprit
    optimizer.zero_grad()
    policy_loss.backward()  # <- raises
    optimizer.step()
    scores.append(20 - sum(rewards))
    if episode % 50 == 49:
        print(f"episode {episode} lost reward loss {sum(scores[-50:]) / 50:.3f}")
