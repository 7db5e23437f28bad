"""Runner for OpenVINO GenAI: MODEL is a folder of ``optimum-cli export openvino``. Needs openvino-genai."""

# Lives in another interpreter than the one that type-checks:
# mypy: disable-error-code=import-not-found

import harness
import numpy as np
import openvino
import openvino_genai

MILLISECONDS = 1000.0


class OpenVino:
    """The pipeline a user would write, with the pipeline's own metrics as the stopwatch."""

    def __init__(self, job: harness.Job) -> None:
        # Set, because its default counts physical cores, not the CPUs this process may use.
        self._pipeline = openvino_genai.LLMPipeline(str(job.model), "CPU", INFERENCE_NUM_THREADS=job.threads)

    def generate(self, prompt: list[int], new_tokens: int) -> harness.Timing:
        """Greedy, from token ids: no tokenizer in the measured time."""
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = new_tokens
        config.ignore_eos, config.do_sample = True, False
        ids = openvino.Tensor(np.array([prompt], np.int64))  # (1, P)
        mask = openvino.Tensor(np.ones((1, len(prompt)), np.int64))
        metrics = self._pipeline.generate(openvino_genai.TokenizedInputs(ids, mask), config).perf_metrics
        if metrics.get_num_generated_tokens() != new_tokens:
            raise SystemExit(f"{metrics.get_num_generated_tokens()} tokens generated, {new_tokens} expected")
        decode_ms = metrics.get_tpot().mean * (new_tokens - 1)
        return harness.Timing(metrics.get_ttft().mean / MILLISECONDS, decode_ms / MILLISECONDS)

    def details(self) -> dict[str, str]:
        """Version of the CPU plug-in."""
        return {"plugin": str(openvino.get_version())}


if __name__ == "__main__":
    harness.main(OpenVino, packages=["openvino-genai", "openvino"])
