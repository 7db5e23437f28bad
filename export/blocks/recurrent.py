"""Mixers with states: a causal convolution, and a recurrence behind it."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from llmc.export import recurrent_ops as ops
from llmc.export.blocks.linear import as_float, cut
from llmc.export.blocks.mlp import SiLU
from llmc.export.blocks.part import Call, PartModule, Tensors
from llmc.export.blocks.scale import Scale
from llmc.export.parts.norm import NormConfig
from llmc.export.parts.recurrent import RecurrentConfig
from llmc.export.parts.site import Site

# Added to the sum of squares by which the delta rule divides queries and keys. Source: transformers, qwen3_5.
UNIT_EPS = 1e-6


class CausalConv(nn.Module):
    """x (B, S, C), past (B, K - 1, C), new lengths (B) -> each channel's sum over its last K values, past."""

    def __init__(self, channels: int, taps: int, *, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, taps), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(channels), requires_grad=False) if bias else None

    def forward(self, x: Tensor, past: Tensor, new_lengths: Tensor) -> tuple[Tensor, Tensor]:
        y, present = ops.causal_conv(x, as_float(self.weight), past, new_lengths)
        return y if self.bias is None else y + as_float(self.bias), present


class Recurrent(PartModule):
    """A recurrent mixer over states that the caller owns; what rules differ in is named below.

    * ``conv``: C * conv(B * x), with B, C and x made by one projection (LFM2).
    * ``delta``: queries, keys of length one and values go through the convolution and SiLU; the state decays by
      exp(-exp(A_log) * softplus(decay + dt_bias)) and is corrected by beta = sigmoid(beta) (Qwen3.5), or twice that
      (OLMo-Hybrid).
    * ``mamba2``: values, keys and queries likewise; steps dt = softplus(decay + dt_bias) scale values, and the state
      decays by exp(-exp(A_log) * dt); D times the values is added (Granite 4). Of several groups, each is normalised by
      itself.
    """

    def __init__(self, config: RecurrentConfig, site: Site, norm: NormConfig) -> None:
        super().__init__(config, site, replace(norm, eps=config.norm_eps or norm.eps))
        self.config, self.beta_scale = config, Scale(config.beta_scale)
        self.gate_scale, self.step_scale = Scale(config.scales[0]), Scale(config.scales[4])
        self.conv = CausalConv(config.channels, config.taps, bias=config.bias)
        self.conv_act, self.gate_act = SiLU(), SiLU()

    def forward(self, x: Tensor, past: Tensors | None, call: Call) -> tuple[Tensor, Tensors]:
        """x (B, S, N), states -> values (B, S, N), states."""
        assert past is not None and call.new_lengths is not None
        if self.config.rule == "conv":
            before, after, inner = cut(self.in_proj(x), *[self.config.channels] * 2)
            mixed, present = self.conv(before * inner, past[0], call.new_lengths)
            return self.out_proj(after * mixed), (present,)
        return self._recur(x, past, call.new_lengths)

    def _recur(self, x: Tensor, past: Tensors, new_lengths: Tensor) -> tuple[Tensor, Tensors]:
        config, keys = self.config, self.config.key_heads * self.config.key_dim
        if config.apart:
            read = torch.cat((self.q_proj(x), self.k_proj(x), self.v_proj(x)), -1)
        else:
            read = self.in_proj(x)
        mixed, conv_state = self.conv(read, past[0], new_lengths)
        parts, gate = self.conv_act(mixed), self.gate_act(self.gate_scale(self.gate_proj(x)))
        delta = config.rule == "delta"
        if delta:
            q, k, v = cut(parts, keys, keys)
            beta = self.beta_scale(torch.sigmoid(self.beta_proj(x)))
        else:
            v, k, q = cut(parts, config.inner, keys)
        steps = ops.softplus(self.step_scale(self.decay_proj(x)) + as_float(self.dt_bias))
        steps = steps.clamp(min=config.least_step) if config.least_step else steps
        beta = beta if delta else steps
        decay = steps * -torch.exp(as_float(self.A_log))
        knobs = ops.Knobs(
            key_heads=config.key_heads,
            value_heads=config.value_heads,
            scale=config.key_dim**-0.5 if delta else 1.0,
            delta=delta,
            unit_eps=UNIT_EPS if delta else 0.0,
        )
        y, state = ops.linear_attention(q, k, v, past[1], decay, beta, new_lengths, knobs)
        if config.rule == "mamba2":
            heads = v.view(*v.shape[:-1], config.value_heads, config.value_dim)
            y = y + (heads * as_float(self.D).unsqueeze(-1)).flatten(-2)
        y = self._normalize(y * gate) if config.gate_first else self._normalize(y) * gate
        return self.out_proj(y), (conv_state, state)

    def _normalize(self, y: Tensor) -> Tensor:
        y = self.normalize("norm", y)
        return y * as_float(self.norm_scale) if self.config.scaled_apart else y
