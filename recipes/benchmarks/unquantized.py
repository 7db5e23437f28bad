"""The checkpoint as transformers computes it in float32: reference logits, and how large each linear's inputs are.

transformers belongs to neither side, so neither is measured against itself.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AutoModelForCausalLM


class Unquantized:
    """A checkpoint in float32 on the CPU."""

    def __init__(self, checkpoint: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, local_files_only=True)

    @property
    def matrix_weights(self) -> int:
        """Number of weights in matrices, a tied head counted once."""
        return sum(parameter.numel() for parameter in self._model.parameters() if parameter.ndim > 1)

    @torch.inference_mode()
    def logits(self, windows: NDArray[np.int64], path: Path) -> NDArray[np.float32]:
        """Write the logits of every window into a .npy file and map it: float32 [windows, length, V]."""
        shape = (*windows.shape, self._model.config.vocab_size)
        output = np.lib.format.open_memmap(path, "w+", np.float32, shape)
        for row, tokens in zip(output, windows, strict=True):
            row[:] = self._model(input_ids=torch.from_numpy(tokens[None]), use_cache=False).logits[0].numpy()
        output.flush()
        return output

    @torch.inference_mode()
    def importance(self, windows: NDArray[np.int64]) -> dict[str, NDArray[np.float32]]:
        """Mean square of each input of each decoder linear, by weight name: what ``llama-imatrix`` collects.

        As there, embedding and head are left out.
        """
        sums: dict[str, Tensor] = {}
        linears = {f"{n}.weight": m for n, m in self._model.model.named_modules() if isinstance(m, nn.Linear)}
        hooks = [m.register_forward_pre_hook(_adder(sums, f"model.{name}")) for name, m in linears.items()]
        for tokens in windows:
            self._model(input_ids=torch.from_numpy(tokens[None]), use_cache=False)
        for hook in hooks:
            hook.remove()
        return {name: (total / windows.size).float().numpy() for name, total in sums.items()}


def _adder(sums: dict[str, Tensor], name: str) -> Any:
    def add(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        squares = inputs[0].double().square().flatten(0, -2).sum(dim=0)
        sums[name] = sums[name] + squares if name in sums else squares

    return add
