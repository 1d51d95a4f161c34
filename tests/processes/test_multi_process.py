"""Several real processes over gloo: the same numbers as one process, and a clean end when one of
them dies."""

import json
import os
import pathlib
import runpy
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

import optax_wrappers as ow
from optax_wrappers import codecs

SCRIPT = pathlib.Path(__file__).parents[2] / "examples" / "multi_process.py"

STEPS = 30


def run(*options, **kwargs):
  return subprocess.run(
    [sys.executable, SCRIPT, *map(str, options)],
    timeout=200,
    capture_output=True,
    text=True,
    **kwargs,
  )


def start(rank, coordinator, *options):
  options = [*map(str, options), "--platform", "cpu"]
  command = [sys.executable, SCRIPT, *options, "--rank", str(rank), "--coordinator", coordinator]
  return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def free_address():
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    return f"127.0.0.1:{free.getsockname()[1]}"


@pytest.mark.parametrize("processes", [2, 4])
def test_processes_match_one_process_with_simulated_devices(tmp_path, processes):
  common = ["--processes", processes, "--steps", STEPS]
  several = run(*common, "--json", tmp_path / "several.json")
  assert several.returncode == 0, several.stderr
  assert several.stdout.count("process ") == 2 * processes
  one = run(*common, "--simulate", "--json", tmp_path / "one.json")
  assert one.returncode == 0, one.stderr
  a, b = (json.loads((tmp_path / name).read_text()) for name in ("several.json", "one.json"))
  for wrapper in ("cross_shard", "elastic_average"):
    for x, y in zip(a[wrapper]["shared"], b[wrapper]["shared"], strict=True):
      np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
  ("wrapper", "pod"),
  [("elastic_average", 1), ("cross_shard", 4), ("diloco", 4)],
)
def test_processes_with_pods_of_devices_match_one_process(tmp_path, wrapper, pod):
  """Of a pod the parameters are sharded over its devices, and the center of diloco is divided."""
  devices = max(2, pod)
  common = ["--processes", 2, "--steps", STEPS, "--wrapper", wrapper]
  common += ["--local-devices", devices, "--pod", pod]
  several = run(*common, "--json", tmp_path / "several.json")
  assert several.returncode == 0, several.stderr
  assert f"{2 * devices} cpu devices in 2 processes" in several.stdout
  one = run(*common, "--simulate", "--json", tmp_path / "one.json")
  assert one.returncode == 0, one.stderr
  a, b = (
    json.loads((tmp_path / name).read_text())[wrapper] for name in ("several.json", "one.json")
  )
  for x, y in zip(a["shared"], b["shared"], strict=True):
    np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(not os.path.exists("/proc/net/dev"), reason="reads Linux's counters")
def test_codec_bytes_on_network_interface_match_num_bytes():
  """Read from the counters of the interface, which other programs share: of megabytes."""
  width, layers = 512, 2
  script = SCRIPT.parent.parent / "benchmarks" / "compression.py"
  chosen = {
    "float32": 4 * width**2,
    "8 bits": codecs.quantize(8).num_bytes(width**2),
    "4 bits": codecs.quantize(4).num_bytes(width**2),
    "PowerSGD, rank 4": ow.contrib.power_sgd(4).num_bytes((width, width)),
  }
  given = ["--json", "--rounds", 1, "--layers", layers, "--width", width, "--codecs", *chosen]
  done = subprocess.run(
    [sys.executable, script, *map(str, given)], capture_output=True, text=True, timeout=200
  )
  assert done.returncode == 0, done.stderr
  found = json.loads(done.stdout.splitlines()[-1])["bytes"]
  for name, num_bytes in chosen.items():
    expected = layers * (num_bytes + 4 * width)
    assert expected <= found[name] <= 1.1 * expected + 10_000, name


def test_launcher_environment_platform_and_devices_are_kept():
  """Not one forced CPU device: as many as the environment gives, here three."""
  environment = os.environ | {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_force_host_platform_device_count=3",
  }
  given = [
    "--processes",
    1,
    "--rank",
    0,
    "--coordinator",
    free_address(),
    "--wrapper",
    "cross_shard",
    "--steps",
    2,
  ]
  result = run(*given, env=environment)
  assert result.returncode == 0, result.stderr
  assert "3 cpu devices in 1 processes" in result.stdout
  one = run(
    *given[:4], "--coordinator", free_address(), *given[6:], "--platform", "cpu", env=environment
  )
  assert "1 cpu devices in 1 processes" in one.stdout


@pytest.mark.skipif(not os.path.exists("/proc/net/tcp"), reason="reads Linux's table of sockets")
def test_coordinator_listens_on_loopback_only():
  coordinator = free_address()
  port = int(coordinator.rpartition(":")[2])
  ranks = [start(rank, coordinator, "--processes", 2, "--steps", 10**6) for rank in range(2)]

  def listening():
    """Addresses, as the kernel writes them, at which somebody listens on the port."""
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
      for line in pathlib.Path(table).read_text().splitlines()[1:]:
        address, state = line.split()[1], line.split()[3]
        if state == "0A" and address.endswith(f":{port:04X}"):
          found.append(address.partition(":")[0])
    return found

  try:
    deadline = time.monotonic() + 60
    while not listening():
      assert time.monotonic() < deadline, "no process listens"
      time.sleep(0.1)
    # 127.0.0.1 in the machine's order of bytes, as an address of either family.
    assert set(listening()) <= {"0100007F", "0000000000000000FFFF00000100007F"}
  finally:
    for process in ranks:
      process.kill()
      process.communicate()


def test_processes_with_different_final_values_are_error():
  result = run("--processes", 2, "--steps", 2, "--wrapper", "cross_shard", "--diverge", 1)
  assert result.returncode != 0
  assert result.stdout.count("DIFFER between processes") == 2


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("wrapper", "pod"), [("cross_shard", 1), ("diloco", 4)])
def test_killed_process_ends_others_and_checkpoint_resumes(tmp_path, wrapper, pod):
  """SIGKILL in mid-round; then the same command again, from a checkpoint every 23 steps of periods
  of 10. With a pod of four devices to each process too."""
  steps = 2000
  common = ["--processes", 2, "--wrapper", wrapper, "--checkpoint-every", 23]
  common += ["--local-devices", pod, "--pod", pod]
  saved = ["--checkpoint", tmp_path / "saved"]
  coordinator = free_address()
  ranks = [start(rank, coordinator, *common, *saved, "--steps", steps) for rank in range(2)]
  try:
    deadline = time.monotonic() + 100
    while not (tmp_path / "saved" / wrapper / "23").exists():
      assert time.monotonic() < deadline, "no checkpoint was written"
      time.sleep(0.02)
    ranks[1].send_signal(signal.SIGKILL)
    killed = time.monotonic()
    output, _ = ranks[0].communicate(timeout=90)
    assert ranks[0].returncode != 0, output
    assert time.monotonic() - killed < 60
    assert "test accuracy" not in output
  finally:
    for process in ranks:
      process.kill()
      process.communicate()

  last = max(int(name) for name in os.listdir(tmp_path / "saved" / wrapper) if name.isdigit())
  end = last + 13
  resumed = run(*common, *saved, "--steps", end, "--json", tmp_path / "resumed.json")
  assert resumed.returncode == 0, resumed.stderr
  unbroken = run(*common, "--steps", end, "--json", tmp_path / "unbroken.json")
  assert unbroken.returncode == 0, unbroken.stderr
  a, b = (
    json.loads((tmp_path / name).read_text())[wrapper] for name in ("resumed.json", "unbroken.json")
  )
  assert a["digest"] == b["digest"]
  assert a["shared"] == b["shared"]


def test_two_clusters_example_runs_in_two_processes(tmp_path):
  """As its page says, on CPUs: `jax.distributed.initialize()`, and one directory for both."""
  address = free_address()
  lines = []
  for line in SCRIPT.with_name("two_clusters.py").read_text().splitlines():
    if "XLA_FLAGS" in line:
      line = line.replace("count=8", "count=4")
    if "JAX_PLATFORMS" in line:
      rank = 'int(os.environ["RANK"])'
      line += f"\nimport jax\njax.distributed.initialize({address!r}, 2, {rank})"
    lines.append(line)
  program = tmp_path / "program.py"
  program.write_text("\n".join(lines))
  command = [sys.executable, program, "--checkpoint", tmp_path / "saved"]
  environment = os.environ | {"PYTHONPATH": f"{SCRIPT.parent}:{os.environ.get('PYTHONPATH', '')}"}
  processes = [
    subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment | {"RANK": rank})
    for rank in "01"
  ]
  try:
    ends = [process.communicate(timeout=200)[0].splitlines()[-1] for process in processes]
  finally:
    for process in processes:
      process.kill()
  assert ends[0] == ends[1]
  assert ends[0].endswith("resumed bit for bit: True")


def test_two_clusters_example_uses_slow_link_only_in_exchanges(monkeypatch):
  for name in ("XLA_FLAGS", "JAX_PLATFORMS"):  # the program sets them
    monkeypatch.setenv(name, os.environ.get(name, ""))
  monkeypatch.syspath_prepend(SCRIPT.parent)
  program = runpy.run_path(str(SCRIPT.with_name("two_clusters.py")))
  data = np.ones((2, 64, 64), np.float32), np.zeros((2, 64), int), np.ones(2, np.float32)
  carried = jax.tree.map(
    lambda x, sharding: x.update(sharding=sharding),
    jax.eval_shape(program["start"]),
    program["shardings"],
  )
  with jax.numpy_dtype_promotion("standard"):  # for optax.adamw
    lowered = program["mapped"].lower(*carried, *data)
  sent = ow.inspect.compiled_collectives(lowered.compile())
  between = [c for c in sent if any(len({i // 4 for i in group}) > 1 for group in c.groups)]
  assert any(c.conditional for c in between)
  assert all(c.conditional for c in between), between


def test_multi_process_example_errors_options():
  for options, message in (
    (["--processes", 0], "--processes must be at least 1, got 0"),
    (["--pod", 3, "--local-devices", 4], "--pod must divide --local-devices, 4, got 3"),
    (["--rank", 1], "--rank and --coordinator go together"),
  ):
    result = run(*options)
    assert result.returncode == 2
    assert message in result.stderr
