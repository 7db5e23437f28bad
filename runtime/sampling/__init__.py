"""From logits to the next token, on the host, per request.

The steps run in the order of :mod:`llmc.runtime.sampling.processors`. Three promises shape the code:

* *Exact.* No step is approximated. Arithmetic is float32 over the vocabulary, with sums carried on in float64: a
  token's probability is right to about 1e-5 of itself, and only a token whose distance from the edge of the nucleus is
  below about 1e-6 of the total mass may fall on the other side of it. Tokens equally probable, to what float32 can
  tell, stay or go together.
* *Reproducible.* Randomness is a function of (seed, position, draw), not a stream, so a request's tokens do not depend
  on the batch it shares nor on how its steps are grouped. (Other CPUs and numpy versions round otherwise.)
* *Fast.* Sorting 150,000 logits takes 10 ms. Top-k needs a sort of a few candidates only, top-p none at all: see
  :class:`RandomSampler`.
"""
