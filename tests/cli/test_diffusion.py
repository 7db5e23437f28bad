"""``llmc`` with a bundle of a diffusion model."""

import json
import re
from pathlib import Path


def test_run_takes_its_parameters_and_refuses_others_by_name(llmc, diffusion_models: Path):
    folder = diffusion_models / "Dream-fp32"
    asked = ("run", folder, "-p", "import os", "--max-tokens", 20, "--temperature", 0, "--ignore-eos")
    whole = llmc(*asked, "--block-length", 8, "--confidence-threshold", 0.5, "--json")
    assert whole.code == 0 and len(json.loads(whole.out)["outputs"][0]["token_ids"]) == 20, whole.err
    said = llmc(*asked, "--chat", "--diffusion-steps", 5)
    assert said.code == 0 and said.out.strip(), said.err
    stats = llmc(*asked, "--block-length", 8, "--diffusion-steps", 5, "--stats").err
    found = re.fullmatch(
        r"22 of .* tokens, (.*) tokens/s with the prompt; prompt 2 tokens; answer 20 tokens in 5 calls; .*\n", stats
    )
    assert found and float(found[1]) > 0, stats
    refused = llmc(*asked, "--num-beams", 2)
    assert refused.code == 2 and "--num-beams is 2, which a diffusion model cannot have" in refused.err


def test_eval_compares_all_tokens_with_half_of_them_hidden(llmc, diffusion_models: Path):
    found = llmc("eval", diffusion_models / "llada-fp32", "--reference", diffusion_models / "llada-export", "--json")
    assert found.code == 0 and json.loads(found.out)["mean_kl"] < 1e-6, found.err
