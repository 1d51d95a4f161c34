"""A codec of one sign per shard."""

import jax.numpy as jnp

from optax_wrappers import codecs


def majority_vote() -> codecs.Codec:
  """One sign from every shard, and the majority's back: every update is 1 or -1, a tie 1.

  Mean and sum give the same, and weights are an error. Vectors vote too. A NaN votes -1.

  Source: Bernstein et al., "signSGD with majority vote" (2018), algorithm 1.
  """

  def encode(x):
    return jnp.packbits(x >= 0, axis=-1)

  def decode(code, n):
    return jnp.where(jnp.unpackbits(code, axis=-1, count=n) == 1, 1.0, -1.0)

  return codecs.Codec(
    encode,
    decode,
    num_bytes=lambda n: -(-n // 8),
    name="majority_vote()",
    recodes=True,
    feedback="none",
    # Vectors too: an update without a vote would have another scale than the others.
    applies_to=lambda shape: True,
  )
