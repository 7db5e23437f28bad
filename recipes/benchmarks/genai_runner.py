"""Runner for onnxruntime-genai: MODEL is a folder of its model builder. Needs onnxruntime-genai."""

# Lives in another interpreter than the one that type-checks:
# mypy: disable-error-code=import-not-found

import json

import harness
import numpy as np
import onnxruntime_genai


class GenAi:
    """The token loop of its examples."""

    def __init__(self, job: harness.Job) -> None:
        config = onnxruntime_genai.Config(str(job.model))
        # Set, because its default is half the cores.
        options = {"model": {"decoder": {"session_options": {"intra_op_num_threads": job.threads}}}}
        config.overlay(json.dumps(options))
        self._model = onnxruntime_genai.Model(config)

    def generate(self, prompt: list[int], new_tokens: int) -> harness.Timing:
        """Greedy; the minimum length keeps the end token from stopping it."""
        parameters = onnxruntime_genai.GeneratorParams(self._model)
        length = len(prompt) + new_tokens + 1  # at the maximum it would stop
        parameters.set_search_options(max_length=length, min_length=length, do_sample=False)
        generator = onnxruntime_genai.Generator(self._model, parameters)
        ids = np.array(prompt, np.int32)

        def prefill() -> None:
            generator.append_tokens(ids)
            generator.generate_next_token()

        timing = harness.time_steps(prefill, generator.generate_next_token, new_tokens)
        generated = len(generator.get_sequence(0)) - len(prompt)
        if generated != new_tokens:
            raise SystemExit(f"{generated} tokens generated, {new_tokens} expected")
        return timing

    def details(self) -> dict[str, str]:
        """Nothing beyond what every runner reports."""
        return {}


if __name__ == "__main__":
    harness.main(GenAi, packages=["onnxruntime-genai", "onnxruntime"])
