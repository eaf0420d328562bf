"""The first fix of a diagnosis, applied as written, repairs the program; `first_fixes.py` does the same for every case."""

from __future__ import annotations

import pytest
import torch
from case import HERE, load
from first_fixes import judge

REPAIRED = [
    "inplace/byol_target_update_early",
    "inplace/gru_stack_hidden_slots",
    "inplace/masked_softmax_rows",
    "inplace/reinforce_baseline_two_optimizers",
    "inplace/srgan_fake_score_reused",
    "lifetime/factorization_forward_outside_loop",
    "lifetime/lbfgs_forward_outside_closure",
    "lifetime/parametrized_weights_cached_epoch",
    "lifetime/rotary_frequency_cache",
    "lifetime/vae_learned_prior_object",
    "nopath/explanation_loss_plain_input",
    "nopath/fgsm_gradient_of_normalised_image",
    "nopath/rollout_generator_no_grad",
    "nopath/soft_prompt_frozen_text_encoder",
    "contract/critic_attention_penalty",
    "contract/quant_linear_flat_grad",
    "numerics/topic_vae_logvar_overflow",
]


@pytest.mark.parametrize("case", REPAIRED)
def test_first_fix_repairs_the_program(case: str) -> None:
    torch.set_num_threads(1)  # a fork must not inherit a pool of threads that are not there
    verdict = judge(load(HERE / f"{case}.py"), "standard")
    assert verdict.result == "repaired", (verdict.titles, verdict.last.output)
