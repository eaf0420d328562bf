"""The collective calls of torch.distributed that copy values between ranks and have no backward."""

from __future__ import annotations

# As torch hands them to function modes: which argument they fill and which they read, each by position and name.
GATHERING = {
    "all_gather": ((0, "tensor_list"), (1, "tensor")),
    "all_gather_into_tensor": ((0, "output_tensor"), (1, "input_tensor")),
    "all_gather_single": ((0, "output_tensor"), (1, "input_tensor")),
    "all_to_all_single": ((0, "output"), (1, "input")),
    "gather": ((1, "gather_list"), (0, "tensor")),
    "scatter": ((0, "tensor"), (1, "scatter_list")),
}
