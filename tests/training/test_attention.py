"""On a GPU: attention as training uses it has the right gradients where PyTorch's own choice may not."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from lorazor.training.finetune_trainer import ATTENTION

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
WIDTH, HEAD = 64, 64


def gradients(backends: list[SDPBackend]) -> list[Tensor]:
    """Of queries, keys and values whose every logit is about -120, under an explicit causal mask, in bfloat16."""
    torch.manual_seed(0)
    q, k = (torch.randn(1, 1, WIDTH, HEAD, device="cuda") * 0.1 for _ in range(2))
    v, out = (torch.randn(1, 1, WIDTH, HEAD, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    q[..., 0], k[..., 0] = 1.0, -120 * math.sqrt(HEAD)
    q, k, v = leaves = [x.to(torch.bfloat16).requires_grad_() for x in (q, k, v)]
    mask = torch.ones(WIDTH, WIDTH, dtype=torch.bool, device="cuda").tril()[None, None]
    with sdpa_kernel(backends):
        scaled_dot_product_attention(q, k, v, attn_mask=mask).backward(out)  # type: ignore[no-untyped-call]
    return [x.grad.float() for x in leaves if x.grad is not None]


def test_gradients_are_finite() -> None:
    """The case of pytorch/pytorch#196678, in which cuDNN's gradients of the queries are NaN."""
    found, plain = gradients(ATTENTION), gradients([SDPBackend.MATH])
    assert all(torch.isfinite(x).all() for x in found)
    # Those of queries and keys are small differences of large numbers here, in bfloat16.
    assert (found[2] - plain[2]).norm() <= 0.02 * plain[2].norm()
