# expect: GG302
# names: student_out
import torch
from torch import nn

torch.manual_seed(0)
student, teacher = nn.Linear(6, 4), nn.Linear(6, 4)
optimizer = torch.optim.Adam(student.parameters())


def distance(a, b):
    return (a - b).pow(2).mean()


for _ in range(3):
    x = torch.randn(10, 6)
    with torch.no_grad():
        goal = teacher(x)
    student_out = student(x).detach()  # BUG
    loss = distance(goal, student_out)
    shown = loss.detach()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
