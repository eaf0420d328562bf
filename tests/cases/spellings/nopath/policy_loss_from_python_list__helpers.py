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


def policy_forward(owner, obs):
    return Categorical(logits=owner.logits(torch.relu(owner.body(obs))))


class Policy(nn.Module):
    def __init__(self, obs_dim=3, hidden=24, n_actions=2):
        super().__init__()
        self.body = nn.Linear(obs_dim, hidden)
        self.logits = nn.Linear(hidden, n_actions)

    def forward(self, obs):
        return policy_forward(self, obs)


def balance_env_reset(owner):
    owner.x, owner.v, owner.t = torch.randn(()).item() * 0.5, 0.0, 0
    return owner.obs()


def balance_env_obs(owner):
    return torch.tensor([owner.x, owner.v, 1.0])


def balance_env_step(owner, action):
    owner.v = 0.8 * owner.v + 0.2 * (2 * action - 1) + 0.02 * torch.randn(()).item()
    owner.x += owner.v
    owner.t += 1
    return owner.obs(), 1.0 - min(abs(owner.x), 2.0), owner.t >= 20


class BalanceEnv:
    """Keep a noisy scalar near zero by pushing left or right."""

    def reset(self):
        return balance_env_reset(self)

    def obs(self):
        return balance_env_obs(self)

    def step(self, action):
        return balance_env_step(self, action)


def discounted(rewards, gamma=0.9):
    out, running = [], 0.0
    for r in reversed(rewards):
        running = r + gamma * running
        out.insert(0, running)
    return out


env, policy = BalanceEnv(), Policy()
optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
scores = []


def finish_batch(policy_loss, optimizer, scores, rewards, episode):
    policy_loss.backward()  # <- raises
    optimizer.step()
    scores.append(20 - sum(rewards))
    if episode % 50 == 49:
        print(f"episode {episode} lost reward loss {sum(scores[-50:]) / 50:.3f}")


def begin_batch(env, policy, optimizer):
    obs, done, log_probs, rewards = env.reset(), False, [], []
    while not done:
        dist = policy(obs)
        action = dist.sample()
        log_probs.append(dist.log_prob(action))
        obs, reward, done = env.step(action.item())
        rewards.append(reward)
    returns = torch.tensor(discounted(rewards))
    returns = (returns - returns.mean()) / (returns.std() + 1e-6)
    policy_loss = torch.tensor([-lp * ret for lp, ret in zip(log_probs, returns)]).sum()  # <- culprit
    optimizer.zero_grad()
    return rewards, policy_loss
for episode in range(100):
    rewards, policy_loss = begin_batch(env, policy, optimizer)
    finish_batch(policy_loss, optimizer, scores, rewards, episode)
