"""What the page *In a trainer* shows, in a trainer that others wrote: needs its extra."""

import itertools

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fences import ROOT, fences
from flax import nnx

import optax_wrappers as ow

VOCABULARY = 8
LENGTHS = ([9, 3, 5, 7], [1, 1, 1, 1], [2, 1, 2, 1])  # with 1, nothing is predicted


class Model(nnx.Module):
  def __init__(self):
    self.table = nnx.Param(jnp.asarray(np.random.default_rng(0).normal(size=(VOCABULARY,) * 2)))

  def __call__(self, tokens):
    return self.table[tokens]


def loss(model, input_tokens, input_mask):
  targets, mask = input_tokens[:, 1:], input_mask[:, 1:]
  losses = optax.softmax_cross_entropy_with_integer_labels(model(input_tokens[:, :-1]), targets)
  return jnp.sum(losses * mask) / mask.sum()


def gradients_by_hand():
  """Returns, for each micro-batch, the sum of its tokens' gradients, and their number."""
  table = np.asarray(Model().table[...])
  for tokens, mask in batches():
    total = np.zeros_like(table)
    for row, valid in zip(tokens, mask, strict=True):
      for here, following in itertools.pairwise(row[: valid.sum()]):
        odds = np.exp(table[here])
        total[here] += odds / odds.sum() - np.eye(VOCABULARY)[following]
    yield total, int((mask.sum(1) - 1).sum())


def batches():
  rng = np.random.default_rng(1)
  for lengths in LENGTHS:
    tokens = rng.integers(0, VOCABULARY, (4, 9)).astype(np.int32)
    yield tokens, (np.arange(9) < np.array(lengths)[:, None]).astype(np.int32)


@pytest.mark.optax_promotes
@pytest.mark.filterwarnings("ignore:jax.interpreters.pxla.thread_resources")  # in Tunix 0.1.7
def test_tunix_accumulates_by_tokens_as_the_page_shows():
  peft_trainer = pytest.importorskip("tunix.sft.peft_trainer", reason="an extra of its own")
  scope = {"peft_trainer": peft_trainer, "nnx": nnx, "optax": optax}
  shown = fences(ROOT / "docs" / "in-a-trainer.md", "py")
  exec(next(code for code in shown if "class ByTokens" in code), scope)

  config = peft_trainer.TrainingConfig(eval_every_n_steps=100)
  tx = ow.gather_towers(optax.sgd(1.0), len(LENGTHS))
  trainer = scope["ByTokens"](Model(), tx, config).with_loss_fn(loss)
  trainer.with_gen_model_input_fn(
    lambda x: {"input_tokens": x.input_tokens, "input_mask": x.input_mask}
  )
  trainer.train([peft_trainer.TrainingInput(*batch) for batch in batches()])

  sums, tokens = zip(*gradients_by_hand(), strict=True)
  expected = np.asarray(Model().table[...]) - sum(sums) / sum(tokens)
  np.testing.assert_allclose(trainer.model.table[...], expected, atol=1e-6)
