"""Flax's boxes in the forms that trainers have, for several test modules."""

import jax.numpy as jnp
import optax

import optax_wrappers as ow


def linen_boxes():
  import flax.linen as nn

  box = nn.LogicallyPartitioned(jnp.ones((64, 32)), ("vocab", "embed"))
  return {"k": box, "b": nn.LogicallyPartitioned(jnp.ones(32), ("embed",))}


def nnx_boxes():
  from flax import nnx

  make = {"k": ((64, 32), ("vocab", "embed")), "b": ((32,), ("embed",))}
  # A box alone, as `nnx.state` of an abstract model has it.
  params = {name: nnx.Param(jnp.ones(shape)) for name, (shape, _) in make.items()}
  return nnx.State({n: p.copy(out_sharding=make[n][1]) for n, p in params.items()})


BOXED = {
  "staleness": lambda: ow.contrib.params_history(ow.drop_stale(optax.adam(0.1), 3), 3),
  "simulated": lambda: ow.contrib.simulate_workers(optax.adam(0.1), 2),
  "towers": lambda: ow.gather_towers(optax.adam(0.1), 2),
  "coded": lambda: ow.cross_shard(optax.adam(0.1), "pod", codec=ow.codecs.quantize(8)),
  "diloco": lambda: ow.diloco(optax.adam(0.1), "pod", codec=ow.codecs.quantize(8)),
  "divided": lambda: ow.diloco(optax.adam(0.1), "pod", shard_center=True),
  "in fragments": lambda: ow.diloco(optax.adam(0.1), "pod", fragments=2, delay=1),
  "elastic": lambda: ow.elastic_average(optax.adam(0.1), "pod", rho=0.1),
  "gossip": lambda: ow.contrib.gossip_average(optax.adam(0.1), "pod"),
}
