"""Train an actor and a critic to keep a ball in the middle of a line that pushes it away.

`--break`: the critic's values have the shape [n, 1], the returns [n]. Their difference is [n, n]: every value is compared with every
return, and the critic learns their mean. Nothing is raised.
"""

import argparse

import torch
from torch import nn


class Line:
    """A ball at a place and with a speed; the actions push it left or right. It ends when the ball has left [-1, 1]."""

    def reset(self) -> torch.Tensor:
        self.place, self.speed, self.time = float(torch.empty(()).uniform_(-0.3, 0.3)), 0.0, 0
        return self.state()

    def state(self) -> torch.Tensor:
        return torch.tensor([self.place, self.speed])

    def step(self, action: int) -> tuple[torch.Tensor, float, bool]:
        self.speed += 0.02 * self.place + (0.02 if action else -0.02)
        self.place += self.speed
        self.time += 1
        return self.state(), 1.0 - abs(self.place), abs(self.place) > 1 or self.time == 40


def returns_of(rewards: list[float], discount: float = 0.95) -> torch.Tensor:
    returns, following = [], 0.0
    for reward in reversed(rewards):
        following = reward + discount * following
        returns.append(following)
    return torch.tensor(returns[::-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--break", dest="broken", action="store_true", help="run the program with its bug")
    parser.add_argument("--episodes", type=int, default=100)
    options = parser.parse_args()

    torch.manual_seed(0)
    actor = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))
    critic = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()], lr=0.01)
    line = Line()

    for episode in range(1, options.episodes + 1):
        states, actions, rewards = [line.reset()], [], []
        done = False
        while not done:
            with torch.no_grad():
                action = torch.distributions.Categorical(logits=actor(states[-1])).sample()
            state, reward, done = line.step(int(action))
            states.append(state)
            actions.append(action)
            rewards.append(reward)

        seen, returns = torch.stack(states[:-1]), returns_of(rewards)
        values = critic(seen) if options.broken else critic(seen).squeeze(-1)
        advantages = returns - values
        critic_loss = advantages.pow(2).mean()
        chosen = torch.distributions.Categorical(logits=actor(seen)).log_prob(torch.stack(actions))
        actor_loss = -(chosen * advantages.detach()).mean()
        optimizer.zero_grad()
        (actor_loss + 0.5 * critic_loss).backward()
        optimizer.step()
        if episode % 20 == 0:
            print(f"episode {episode}: {len(rewards)} steps, critic loss {critic_loss.item():.3f}")


if __name__ == "__main__":
    main()
