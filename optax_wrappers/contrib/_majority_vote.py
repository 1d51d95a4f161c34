"""A codec of one sign per shard."""

import jax.numpy as jnp

from optax_wrappers.codecs import Codec, _pack, _unpack


def majority_vote() -> Codec:
  """One sign from every shard, and the majority's back: every update is 1 or -1, a tie 1.

  Mean and sum give the same, and weights are an error. Vectors vote too. A NaN votes -1.

  Source: Bernstein et al., "signSGD with majority vote" (2018), algorithm 1.
  """

  def encode(x):
    return _pack((x >= 0).astype(jnp.uint8), 1)

  def decode(codes, n):
    return jnp.where(_unpack(codes, 1, n) == 1, 1.0, -1.0)

  def num_bytes(n):
    return -(-n // 8)

  # Vectors too: an update without a vote would have another scale than the others.
  codec = Codec(encode, decode, num_bytes, "majority_vote()", recodes=True, feedback="none")
  return codec._replace(applies_to=lambda shape: True)
