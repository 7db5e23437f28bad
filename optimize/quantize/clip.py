"""Scales for GPTQ: 8 bits clip nothing, 4 bits clip where that lowers the error of a layer's outputs.

For weights w of one group and the block B of the inputs' second moment H that belongs to the group, a change d of w
costs d B d^T at the output (what other groups could make up for is left out). Among the clip ratios and rounding of
:mod:`.rtn`, steps c explain <w, c>_B^2 / <c, c>_B of <w, w>_B with the scale <w, c>_B / <c, c>_B, where
<a, b>_B = a B b^T; the ratio that explains most wins. Other than with B = 1, <w, c>_B can be negative; on a positive
grid such a c explains nothing.

In 8 bits channels to come make up for errors of rounding, not for weights far outside: with a search, outputs of
SmolLM2's first layers are 12 % worse. In 4 bits fewer ratios make a layer's outputs 2 to 6 % better and the answers of
SmolLM2 worse all the same (KL 0.21 with two of them instead of 0.19).

Source: AWQ searches the clip of a group by the error of its output (Lin et al. 2023, arXiv:2306.00978, section 5.1).
"""

import torch
from torch import Tensor

from llmc.optimize.quantize.grid import SMALLEST_SCALE, Grid
from llmc.optimize.quantize.rtn import CLIP_RATIOS

# Added to a block's diagonal, as a share of H's mean: where inputs were never seen, weights count as in plain rounding.
FLOOR = 1e-6
# Weights that are searched at a time: their arrays stay in the second-level cache.
PIECE = 1 << 17


def search(weights: Tensor, second_moment: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """Scales and zero points of least output error, of integers that round to nearest.

    Args:
        weights: float32 [N, K]; a weight of 0 stays 0.
        second_moment: X^T X / tokens, float32 [K, K].
        grid: bits, block, symmetry and sign of the scales.

    Returns:
        Scales [N, groups] and zero points [N, groups], 0 on a symmetric grid. The scale of zeros is 0, on a positive
        grid the smallest normal number.
    """
    rows, inputs = weights.shape
    width, groups = grid.width(inputs), grid.groups(inputs)
    grouped = torch.nn.functional.pad(weights, (0, groups * width - inputs)).view(rows, groups, width).transpose(0, 1)
    if grid.bits == 4:
        blocks, step = _blocks_of(second_moment, width), max(1, PIECE // (groups * width))
        pieces = [_search(grouped[:, start : start + step], blocks, grid) for start in range(0, rows, step)]
        scales, zeros = (torch.cat(parts, 1) for parts in zip(*pieces, strict=True))
    else:
        scales, zeros = whole_range(grouped, grid)
    if grid.positive:
        scales.clamp_(min=SMALLEST_SCALE)
    return scales[..., 0].T, zeros[..., 0].T


def _blocks_of(moment: Tensor, width: int) -> Tensor:
    """The moments of groups [G, W, W]; where inputs were never seen, or are none, weights count alike."""
    floor = FLOOR * moment.diagonal().mean()
    blocks = []
    for start in range(0, len(moment), width):
        block = moment[start : start + width, start : start + width].clone()
        block.diagonal().add_(floor if floor > 0 else 1)
        short = width - len(block)
        blocks.append(torch.nn.functional.pad(block, (0, short, 0, short)))
    return torch.stack(blocks)


def _search(weights: Tensor, blocks: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """The best scales [G, n, 1] and zero points [G, n, 1] of groups of weights [G, n, W]."""
    unclipped, zeros = whole_range(weights, grid)
    best_gain, best_scale = torch.full_like(unclipped, -1), torch.zeros_like(unclipped)
    for ratio in CLIP_RATIOS[grid.bits]:
        steps = nearest(weights, unclipped * ratio, zeros, grid)
        weighted = steps @ blocks
        projection, norm = ((side * weighted).sum(-1, keepdim=True) for side in (weights, steps))
        scale = torch.where(norm > 0, projection / norm, 0)
        if grid.positive:
            scale.clamp_(min=0)
        better = projection * scale > best_gain
        best_gain = torch.where(better, projection * scale, best_gain)
        best_scale = torch.where(better, scale, best_scale)
    return best_scale, zeros


def whole_range(weights: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """Scales [..., 1] that clip no weight of groups [..., W], 0 where all are 0, and their zero points [..., 1]."""
    lowest, highest = weights.amin(-1, keepdim=True), weights.amax(-1, keepdim=True)
    if grid.positive:
        reached = torch.maximum(highest / grid.high, lowest / grid.low)
        return reached, torch.zeros_like(reached)
    if grid.symmetric:
        return torch.where(highest > -lowest, highest, lowest) / grid.low, torch.zeros_like(lowest)
    lowest, highest = lowest.clamp(max=0), highest.clamp(min=0)
    scales = (highest - lowest) / (grid.high - grid.low)
    zeros = (grid.low - lowest / scales).round().clamp(grid.low, grid.high)
    return scales, torch.where(scales > 0, zeros, 0)


def nearest(weights: Tensor, scales: Tensor, zeros: Tensor, grid: Grid) -> Tensor:
    """Steps c = q - z nearest to the weights; 0 where the scale is. Shapes broadcast."""
    inverse = torch.where(scales == 0, 0, 1 / scales)
    steps = (weights * inverse).round_()
    if grid.symmetric:
        return steps.clamp_(grid.low, grid.high)
    return steps.clamp_(grid.low - zeros, grid.high - zeros)
