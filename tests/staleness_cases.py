"""Policies, optimizers and compensations that several test modules try."""

import numpy as np
import optax
import reference_staleness as ref

import optax_wrappers as ow

START = [np.array([0.5, -1.0, 2.0]), np.array([[0.25, -0.75]])]

POLICIES = {
  "inverse": (ow.staleness.inverse(), ref.inverse()),
  "inverse of Zhang": (ow.staleness.inverse(0), ref.inverse(0)),
  "polynomial": (ow.staleness.polynomial(0.7), ref.polynomial(0.7)),
  "hinge": (ow.staleness.hinge(3.0, 1), ref.hinge(3.0, 1)),
  "exponential": (ow.staleness.exponential(0.4), ref.exponential(0.4)),
  "cosine_gate": (ow.staleness.cosine_gate(3), ref.cosine_gate(3)),
}

INNERS = {
  "sgd": (optax.sgd(0.1), ref.Sgd(0.1)),
  "momentum": (optax.sgd(0.1, 0.9), ref.Momentum(0.1, 0.9)),
  "adam": (optax.adam(0.05), ref.Adam(0.05)),
}

COMPENSATIONS = {
  "none": (None, None),
  "constant": (ow.delay_compensation(0.3), ref.DelayCompensation(0.3)),
  "adaptive": (ow.delay_compensation(2.0, decay=0.9), ref.DelayCompensation(2.0, 0.9)),
}


def arrays(values):
  return [x.astype(np.float32) for x in values]
