"""A worker is lost and the run continues with the others; later another one joins.

    python examples/workers_come_and_go.py

starts four processes on this machine's CPU, over loopback. Each is one DiLoCo worker with its part
of the digits, and every 20 steps all save a checkpoint together. One of them is killed, and JAX's
runtime ends the others. Three processes continue from the last checkpoint, and then four again, one
of which is new and starts from the center. Exits with an error if training does not continue from
where it was.
"""

import argparse
import contextlib
import itertools
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time

parser = argparse.ArgumentParser(
  description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
)
parser.add_argument(
  "--checkpoint",
  metavar="DIR",
  type=lambda path: pathlib.Path(path).absolute(),
  help="new directory to save to (default: a temporary one)",
)
parser.add_argument("--out", help="picture of the loss, such as curve.png")
one = parser.add_argument_group("one process, as the script starts it")
one.add_argument("--coordinator", help="HOST:PORT of process 0")
one.add_argument("--rank", type=int, help="which of the processes this one is")
one.add_argument("--processes", type=int, help="how many")
one.add_argument("--steps", type=int, help="at which to stop")
one.add_argument("--keep", type=int, nargs="*", help="workers of the checkpoint that stay")
one.add_argument("--new", type=int, default=0, help="workers that join (default: %(default)s)")

HEARTBEAT_SECONDS = 10  # a process that is gone this long ends the others
LIMIT_SECONDS = 120  # for any wait
EVERY = 20  # steps between checkpoints
KILL_AT, LOST = 60, 2
PERIOD = 5
BATCH = 32


@contextlib.contextmanager
def started(folder, processes, steps, *options):
  """Processes that train, one worker each, and that are ended in any case."""
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    coordinator = f"127.0.0.1:{free.getsockname()[1]}"
  command = [sys.executable, __file__, "--checkpoint", folder, "--coordinator", coordinator]
  command += ["--processes", processes, "--steps", steps, *options, "--rank"]
  logs = [folder / f"log_{processes}_to_{steps}_rank_{rank}.txt" for rank in range(processes)]
  ranks = []
  try:
    for rank, log in enumerate(logs):
      with log.open("w") as file:
        ranks.append(subprocess.Popen([str(x) for x in [*command, rank]], stderr=file))
    yield ranks
  except Exception:
    for log in logs:
      print(f"--- {log.name}\n{log.read_text()[-2000:]}", file=sys.stderr)
    raise
  finally:
    for process in ranks:
      process.kill()
      process.wait(LIMIT_SECONDS)


def wait(is_over):
  end = time.monotonic() + LIMIT_SECONDS
  while not is_over():
    if time.monotonic() > end:
      raise TimeoutError(f"after {LIMIT_SECONDS} s")
    time.sleep(0.02)


def ended(ranks):
  """The exit statuses of processes that have ended."""
  return [process.returncode for process in ranks if process.poll() is not None]


def launch(folder):
  """The whole scenario; returns the losses of its parts, [(first step, {step: loss})]."""
  with started(folder, 4, 140) as ranks:
    saved = folder / "steps" / str(KILL_AT)  # Orbax gives it this name when it is complete
    wait(lambda: saved.exists() or ended(ranks))
    time.sleep(0.2)  # the next steps are running
    assert not ended(ranks), "a process ended before its time"
    ranks[LOST].send_signal(signal.SIGKILL)
    killed = time.monotonic()
    wait(lambda: len(ended(ranks)) == len(ranks))
    assert all(ended(ranks)), "a process went on to its end without the one that was killed"
    seconds = time.monotonic() - killed
  print(f"worker {LOST} killed; {seconds:.0f} s later the others had ended by themselves")

  for steps, keep, new in ((140, [0, 1, 3], 0), (220, [0, 1, 2], 1)):
    print(f"workers {keep} of the last checkpoint continue, with {new} new", flush=True)
    with started(folder, len(keep) + new, steps, "--new", new, "--keep", *keep) as ranks:
      wait(lambda ranks=ranks: len(ended(ranks)) == len(ranks) or any(ended(ranks)))
      assert not any(ended(ranks)), "a process failed"

  parts = {}
  for line in (folder / "losses.txt").read_text().splitlines():
    start, step, loss = json.loads(line)
    parts.setdefault(start, {})[step] = loss
  return list(parts.items())


def train(args, report):
  """One process: continues from the latest checkpoint, if any, with the remaining workers."""
  rank, num_workers = args.rank, args.processes
  mesh = jax.make_mesh((num_workers,), ("workers",), axis_types=(AxisType.Auto,))
  by_worker, everywhere = NamedSharding(mesh, P("workers")), NamedSharding(mesh, P())
  # The default of 0.7 is for rounds of 500 steps: in short ones the momentum overshoots.
  tx = ow.diloco(optax.adam(2e-3), "workers", communication_period=PERIOD, outer_learning_rate=0.4)

  x_train, x_test, y_train, y_test = digits.load()
  size = len(x_train) // num_workers
  part = [a[rank::num_workers][:size] for a in (x_train, y_train)]  # equally many for all
  del x_train, y_train

  def laid_out(arrays):
    """Returns [worker, example, ...], of which this process has its row."""
    return [jax.make_array_from_process_local_data(by_worker, a[None]) for a in arrays]

  def init(num_workers):
    params = digits.init()
    return ow.stack_workers((params, tx.init(params)), num_workers)

  def step(params, state, x, y):
    grads = jax.grad(digits.cross_entropy)(params, x, y)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  def resize(params, state):
    center = ow.center_params(state)
    newcomer = center, tx.init(center)
    return ow.resize_workers((params, state), args.keep, args.new, newcomer)

  def center_loss(state, x, y):
    return jax.lax.pmean(digits.cross_entropy(ow.center_params(state), x, y), "workers")

  specs = ow.specs(jax.eval_shape(lambda: init(num_workers)), workers="workers")
  shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
  advance = jax.jit(
    ow.map_workers(step, "workers", mesh=mesh), out_shardings=shardings, donate_argnums=(0, 1)
  )
  evaluate = jax.jit(ow.map_workers(center_loss, "workers", out_axes=None, mesh=mesh))

  manager = ocp.CheckpointManager(
    args.checkpoint / "steps", item_handlers=ocp.StandardCheckpointHandler()
  )
  start = manager.latest_step() or 0
  if start:
    saved = jax.tree.leaves(manager.item_metadata(start)[0])[0].shape[0]  # workers
    # Rows of that many workers do not divide over these devices: every process reads all of them.
    target = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere),
      jax.eval_shape(lambda: init(saved)),
    )
    restored = manager.restore(start, args=ocp.args.StandardRestore(target))
    params, state = jax.jit(resize, out_shardings=shardings)(*restored)
  else:
    params, state = jax.jit(lambda: init(num_workers), out_shardings=shardings)()

  all_images = laid_out(part)
  for i in range(start, args.steps + 1):
    if i % EVERY == 0:
      loss = float(evaluate(state, *all_images))
      if rank == 0:
        print(f"step {i:3}: {num_workers} workers, loss {loss:.3f}", file=report)
        with open(args.checkpoint / "losses.txt", "a") as file:
          print(json.dumps([start, i, loss]), file=file)
      if i > start:
        manager.save(i, args=ocp.args.StandardSave((params, state)))
        manager.wait_until_finished()
    if i < args.steps:
      rows = np.random.default_rng([rank, i]).integers(0, size, BATCH)
      params, state = advance(params, state, *laid_out([a[rows] for a in part]))
      time.sleep(0.02)  # so that the process is killed between two checkpoints
  manager.close()
  if rank == 0:
    center = jax.tree.map(lambda x: np.asarray(x.addressable_data(0)), ow.center_params(state))
    accuracy = float(digits.accuracy(center, x_test, y_test))
    (args.checkpoint / "accuracy.txt").write_text(str(accuracy))


def draw(parts, out):
  from matplotlib.figure import Figure

  figure = Figure(figsize=(7, 4), layout="constrained")
  axes = figure.subplots()
  for (start, losses), label in zip(parts, ("4 workers", "3 workers", "4 again"), strict=True):
    axes.plot(list(losses), list(losses.values()), ".-", label=label)
    if start > 0:
      axes.axvline(start, color="gray", linestyle=":")
  axes.set(xlabel="step", ylabel="training loss of the center", yscale="log")
  axes.legend()
  figure.savefig(out)


def main(args):
  with tempfile.TemporaryDirectory() as temporary:
    folder = args.checkpoint or pathlib.Path(temporary)
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
      parser.error(f"--checkpoint must be a new or an empty directory, got {folder}")
    parts = launch(folder)
    accuracy = float((folder / "accuracy.txt").read_text())
  if args.out:
    draw(parts, args.out)
  for (_, before), (start, after) in itertools.pairwise(parts):
    assert max(after.values()) < 1.5 * before[start], (start, before, after)
  assert accuracy > 0.9, accuracy
  print(f"4 workers, one killed, 3 went on, then 4: test accuracy {accuracy:.3f}")


if __name__ == "__main__":
  args = parser.parse_args()
  if args.coordinator is None:
    sys.exit(main(args))

  # C++ libraries write to stdout too: redirect that to stderr.
  report = os.fdopen(os.dup(1), "w", buffering=1)
  os.dup2(2, 1)
  os.environ["JAX_PLATFORMS"] = "cpu"

  import digits
  import jax
  import numpy as np
  import optax
  import orbax.checkpoint as ocp
  from jax.sharding import AxisType, NamedSharding
  from jax.sharding import PartitionSpec as P

  import optax_wrappers as ow

  jax.config.update("jax_num_cpu_devices", 1)
  jax.distributed.initialize(
    args.coordinator,
    args.processes,
    args.rank,
    coordinator_bind_address=args.coordinator,  # by default it listens on every interface
    heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
  )
  train(args, report)
