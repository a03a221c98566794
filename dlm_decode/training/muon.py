"""Muon: momentum whose matrix updates are orthogonalised, in float32.

`torch.optim.Muon` iterates in bfloat16, which takes as long as the rest of a training step on CPUs
without bfloat16 arithmetic.

Source: K. Jordan and others, "Muon: An optimizer for hidden layers in neural networks" (2024),
https://kellerjordan.github.io/posts/muon/.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Muon", "orthogonalised"]

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # quintic Newton-Schulz iteration of the source


def orthogonalised(matrix: Tensor, iterations: int = 5) -> Tensor:
    """Roughly `U V^T` of the matrix's singular value decomposition `U S V^T`."""
    a, b, c = _COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(iterations):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if is_tall else x


class Muon(torch.optim.Optimizer):
    """For the weight matrices of hidden layers.

    Embeddings, heads, biases and norms belong to AdamW.

    Args:
        params: two-dimensional parameters.
        lr: step size; an update has a spectral norm of about 1 before it.
        momentum: of the running gradient, Nesterov style.
    """

    def __init__(self, params: Iterable[nn.Parameter], lr: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """One update; `closure` is not supported."""
        if closure is not None:
            raise ValueError("Muon takes no closure; compute the gradients before step().")
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(parameter)
                running = state["momentum"].lerp_(parameter.grad, 1 - group["momentum"])
                update = orthogonalised(parameter.grad.lerp(running, group["momentum"]))
                scale = max(1.0, parameter.shape[0] / parameter.shape[1]) ** 0.5
                parameter.add_(update, alpha=-group["lr"] * scale)
