"""Runner for llmc: MODEL is a bundle. Needs llmc with its ``cpu`` extra; uses the public runtime only."""

import harness

from llmc.runtime import load


class Llmc:
    """``load`` and ``generate`` as a user calls them; the result's own timings are the stopwatch."""

    def __init__(self, job: harness.Job) -> None:
        self._model = load(job.model, threads=job.threads)

    def generate(self, prompt: list[int], new_tokens: int) -> harness.Timing:
        """Greedy, from token ids."""
        result = self._model.generate(prompt, max_tokens=new_tokens, temperature=0, ignore_eos=True)
        return harness.Timing(result.timings.ttft_s, result.timings.tpot_s * (new_tokens - 1))

    def details(self) -> dict[str, str]:
        """The recipe that the bundle was built by, and its quality where it was measured."""
        recipe, quality = self._model.manifest.recipe, self._model.manifest.quality
        measured = quality.phases.values() if quality else ()
        kl = " / ".join(f"{phase.mean_kl:.4f}" for phase in measured if phase.mean_kl is not None) or "not measured"
        return {
            "recipe": f"{recipe.precision}, blocks of {recipe.block_size}, {recipe.phases} phases",
            "mean KL, prefill / decode": kl,
        }


if __name__ == "__main__":
    harness.main(Llmc, packages=["llmc", "onnxruntime"])
