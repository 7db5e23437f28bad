"""From logits to the next token, on the host, per request.

The steps run in the order of :mod:`llmc.runtime.sampling.processors`. Two promises shape the code:

* *Exact.* No step is approximated. Arithmetic is float32 over the vocabulary, with sums in float64: a token's
  probability is right to about 1e-5 of itself.
* *Reproducible.* Randomness is a function of (seed, position, draw), not a stream, so a request's tokens do not depend
  on the batch it shares nor on how its steps are grouped. (Other CPUs and numpy versions round differently.)
"""
