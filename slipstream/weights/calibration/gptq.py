"""GPTQ: round the columns one after the other, and let the later ones correct the error so far."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.weights.calibration.rounding import GROUP, Groups, fitted_groups

_DAMPING = 0.01  # share of the mean of the diagonal that is added to it
_BLOCK = 128  # columns whose corrections of the others are applied together


def gptq_levels(weight: Tensor, hessian: Tensor) -> tuple[Tensor, Groups]:
    """Return the levels [rows, columns] of a matrix and its groups.

    The groups are fixed before the first column is rounded. Columns with large inputs come first:
    most of the others are left to correct them.

    hessian: [columns, columns]: see `InputStatistics`
    """
    groups = fitted_groups(weight, hessian)
    order = torch.argsort(hessian.diagonal(), descending=True)
    factors = _error_factors(hessian[order][:, order])
    left = weight[:, order].clone()
    scales = groups.scales[:, order // GROUP]
    offsets = groups.offsets[:, order // GROUP]
    levels = torch.empty_like(left)
    for start in range(0, left.shape[1], _BLOCK):
        stop = min(start + _BLOCK, left.shape[1])
        errors = torch.empty_like(left[:, start:stop])
        for column in range(start, stop):
            scale = scales[:, column]
            offset = offsets[:, column]
            level = ((left[:, column] - offset) / scale).round_().clamp_(0, 15)
            levels[:, column] = level
            row = factors[column]
            error = (left[:, column] - (level * scale + offset)) / row[column]
            left[:, column:stop] -= error[:, None] * row[column:stop]
            errors[:, column - start] = error
        left[:, stop:] -= errors @ factors[start:stop, stop:]
    return levels[:, torch.argsort(order)], groups


def _error_factors(hessian: Tensor) -> Tensor:
    """Return the upper Cholesky factor of the inverse: row i holds how much an error of column i
    changes the later columns.
    """
    damped = hessian.double()
    diagonal = damped.diagonal()  # a view
    diagonal[diagonal == 0] = 1.0  # inputs that are always 0
    diagonal += _DAMPING * diagonal.mean()
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    factors: Tensor = torch.linalg.cholesky(inverse, upper=True).float()
    return factors
