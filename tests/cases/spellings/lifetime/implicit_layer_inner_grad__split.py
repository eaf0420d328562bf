# /// case
# title = "Backward of an implicit layer frees its own inner graph, two losses use the layer"
# source = "https://github.com/pytorch/pytorch/issues/65536"
# outcome = "raises"
# torch_error = "Trying to backward through the graph a second time"
# cause = "graph-freed-shared-subgraph"
# names = ["FixedPoint", "ctx.z_out"]
# fix = "retain_graph=True in the last autograd.grad of backward"
# ///
import torch
import torch.nn as nn
import torch.nn.functional as F

from implicit_layer_inner_grad__split_parts import DEQ

torch.manual_seed(0)


protos = 2 * torch.randn(3, 6)
model = DEQ()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(60):
    y = torch.randint(0, 3, (48,))
    x = protos[y] + torch.randn(48, 6)
    logits, x_rec = model(x)
    class_loss, rec_loss = F.cross_entropy(logits, y), F.mse_loss(x_rec, x)
    optimizer.zero_grad()
    # gradients of the two losses are logged separately, so backpropagate them one by one
    class_loss.backward(retain_graph=True)  # <- related
    class_grad = model.weight.grad.norm().item()
    rec_loss.backward()  # <- related
    optimizer.step()
    if step % 15 == 0:
        print(f"step {step} grad {class_grad:.3f} loss {class_loss.item() + rec_loss.item():.4f}")
