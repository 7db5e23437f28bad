"""The parts that layers are made of, as export reads them from a config: an inventory entry plus rules of arithmetic.

Each file describes a part without torch: its linears, norms and other tensors. The torch modules are in
:mod:`llmc.export.blocks`.
"""
