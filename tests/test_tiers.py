"""The fast tier's choice of cases."""

import itertools
import os

import jax
import pytest
from tiers import every_value_once


def test_every_value_once_of_product_chooses_each_value_in_fewest_cases():
  names = ("context", "dtype", "is_last")
  product = itertools.product("abcde", (1, 1.0, True), (False, True))
  cases = [dict(zip(names, values)) for values in product]
  chosen = [cases[place] for place in every_value_once(cases)]
  assert len(chosen) == 5
  for name in names:
    assert {repr(case[name]) for case in chosen} == {repr(case[name]) for case in cases}


def test_every_value_once_keeps_unequal_objects_and_rows_of_a_table():
  one, other = [0], [0]  # equal, and two
  assert every_value_once([{"x": one}, {"x": other}, {"x": one}]) == [0, 1]
  assert every_value_once([{"x": (1, one)}, {"x": (1, other)}, {"x": (1.0, one)}]) == [0, 1, 2]


def test_every_value_once_without_parameters_keeps_all():
  assert every_value_once([{}, {}]) == [0, 1]


@pytest.mark.parametrize("one", [0, 1])
@pytest.mark.parametrize("other", [0, 1])
def test_tier_full_optimizes_cases_of_tier_fast_and_no_others(request, one, other):
  is_optimized = request.config.option.tier == "full" and one == other  # of four, (0, 0) and (1, 1)
  is_quick = os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] == "1" and not is_optimized
  assert jax.config.read("jax_disable_most_optimizations") == is_quick
