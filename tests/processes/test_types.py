"""What a type checker sees from outside."""

import pytest

pytestmark = pytest.mark.optax_promotes


def test_package_types_mypy_finds_wrong_arguments(tmp_path):
  from mypy import api

  lines = [
    "import optax",
    "import optax_wrappers as ow",
    "sgd = optax.sgd(0.1)",
    "tx: optax.GradientTransformationExtraArgs = ow.elastic_average(sgd, 'w')",
    "reveal_type(ow.get_state(None, ow.states.DropStaleState).step)",
    "ow.drop_stale(sgd, max_stalenes=1)",
    "ow.gather_towers(sgd, 'two')",
    "ow.elastic_average(sgd, 'w', order='simultanous')",
    "ow.cross_shard(sgd, reduction='average')",
  ]
  (tmp_path / "user.py").write_text("\n".join(lines))
  report, _, status = api.run(
    ["--no-incremental", "--ignore-missing-imports", str(tmp_path / "user.py")]
  )
  assert status == 1
  assert "Unexpected keyword argument" in report
  assert "max_stalenes" in report
  assert 'Argument 2 to "gather_towers" has incompatible type "str"; expected "int"' in report
  assert 'Revealed type is "jax' in report
  assert 'Argument "order" to "elastic_average" has incompatible type' in report
  assert 'Argument "reduction" to "cross_shard" has incompatible type' in report
  assert report.count("error:") == 4, report
