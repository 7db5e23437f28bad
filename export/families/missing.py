"""Model types that llmc refuses, and what each would take."""

# What it would take, and the types; the table of export/FAMILIES.md.
_NEEDED = {
    "only a family file, made of parts that exist": (
        "arcee bamba dots1 exaone glm glm4_moe gpt_bigcode gpt_neo gptj granitemoeshared helium internlm3 minicpm "
        "minicpm3 ministral nemotron qwen2_moe vaultgemma"
    ),
    "sparse attention, for models of 100 billion parameters and more": (
        "deepseek_v32 deepseek_v4 glm5_next glm_moe_dsa qwen4_exp"
    ),
    "a box for 100 billion parameters and more": "hy_v3 hy_v4 kimi_k25 minimax_m2 step3p7",
    "four residual streams, low-rank residuals and sparse activations": "gemma3n gemma3n_text",
    "per-layer inputs made by a projection alone": "embedding_gemma2 embedding_gemma2_text",
    "a head with fewer rows than the table of embeddings": "apertus1p5 apertus1p5_text",
    "norms inside attention and MLP, and ternary weights": "bitnet",
    "block diffusion": "diffusion_gemma diffusion_gemma_text llada2_moe",
    "a decay for each channel of the delta rule": "kimi_linear",
    "Mamba 1": "falcon_mamba jamba mamba",
    "a recurrence of its own": "recurrent_gemma rwkv xlstm",
    "ALiBi": "bloom falcon mpt",
    "chunked attention": "llama4 llama4_text",
    "the activation ReLU": "opt",
    "a tower for images": (
        "aya_vision cohere2_vision deepseek_vl exaone4_5 glm46v glm4v glm_ocr internvl llava llava_next "
        "llava_onevision minicpmv4_6 minicpmv4_7 ovis2 paligemma phi4_multimodal qwen2_vl"
    ),
    "cross-attention to images": "mllama mllama_text_model",
    "a tower for sound": "granite_speech nemotron_h_omni qwen2_5_omni qwen2_audio qwen3_omni_moe voxtral",
    "cross-attention to an encoder": "bart m2m_100 marian moonshine mt5 t5 t5gemma umt5 whisper",
    "attention by content and position apart": "deberta deberta-v2",
}
MISSING = {name: needed for needed, names in _NEEDED.items() for name in names.split()}
