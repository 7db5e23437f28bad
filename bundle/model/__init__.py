"""The inventory of a decoder: its linears, norms, attentions, MLPs and caches, each listed once.

Export derives the lists from a checkpoint's layers and writes them into ``export.json``; a build carries them into
``llmc.json``. Counts of passes, memory estimates, packing, calibration and the runtime's cache read these lists and
know no model family. Names are module paths of the checkpoint, ``model.layers.0.self_attn.q_proj``.
"""
