"""Pods at scale, on paper: when rounds are decided, and what is read, written and paid.

Nothing is trained. Events are simulated by the rules of `pods.Directory` with `max_age=0`, without
the time that messages take; what a pod asks of its store is counted as in its code.
"""

import argparse
import heapq
import itertools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_wrappers as ow
from optax_wrappers.pods._log import LARGEST_FRAME
from optax_wrappers.pods._records import LARGEST_DECISION
from optax_wrappers.pods._stores import LONGEST, SHARE, Bucket

HOUR = 3600.0
WORK = HOUR / 2  # seconds that a round of work takes, chosen
TIMEOUT = HOUR  # the default of `pods.Directory`
DAY = 48  # rounds
RUN = 54 * DAY  # as long as that of Llama 3
CHIPS = 64  # of a pod, chosen

# Failures of a pod per hour, and for how many seconds it is down in the mean.
# Llama 3 (2024): 419 unexpected interruptions in 54 days on 16,384 GPUs. Down: 10 minutes, the time
# of a recovery on 100,000 GPUs before its improvement ("Fault Tolerant HSDP", 2602.00277).
RESERVED = CHIPS * 419 / (54 * 24 * 16384), HOUR / 6
# "Can't Be Late" (NSDI 2024), preemption/4-node of github.com/skypilot-org/spot-traces, summed over
# three zones: V100s were lost 600 times in 3,066 hours of running and 1,576 hours of none.
DOWN = 1576 / 600 * HOUR
SCARCE = 600 / 3066, DOWN
# AWS Spot Instance Advisor, May 2025, for H100s: 10 to 20 % of machines in 30 days (as quoted by
# thundercompute.com). A pod is 8 machines of 8 GPUs, and ends with any of them.
SPOT = 8 * -math.log(1 - 0.2) / (30 * 24), DOWN
FAILURES = {"none": (0.0, 0.0), "reserved": RESERVED, "spot": SPOT, "scarce spot": SCARCE}
# Relative deviation of the time of a round, drawn anew for each pod and round. "Guard" (2605.17879)
# says that the time of a step varied between runs by 20 %, and by 1 % without slow machines.
SPREADS = 0.01, 0.2
QUORUMS = {"half": lambda pods: pods // 2 + 1, "9 of 10": lambda pods: math.ceil(0.9 * pods)}
GRACES = None, 0.0, 60.0, 900.0

# S3 standard in dollars (aws.amazon.com/s3/pricing, as quoted by c3x.dev); to delete is free.
PRICES = {"put": 5e-6, "list": 5e-6, "get": 4e-7, "delete": 0.0}
PAGE = 1000  # names in a page of a listing (ListObjectsV2)
SPEED = 1e9  # bytes per second that a pod reads, chosen

RETURNS, SENDS, BEGINS_ALONE, DECIDES = range(4)  # at one time, in this order


def simulate(work, quorum, grace, rounds, failures=(0.0, 0.0), seed=0):
  """Decides rounds of pods that come and go; `work[i]` are the seconds of the rounds of pod `i`.

  Returns of each round when it was decided ("at"), the seconds from its first message to that and
  to its quorum, and how many pods counted; of all, how many messages were made, the seconds of work
  that counted ("worked"), and of waits before a quorum and after it the seconds ("waited", "graced")
  and how often a bucket was polled ("polls", "graced_polls").
  """
  rng, pods = np.random.default_rng(seed), len(work)
  work = [[float(seconds) for seconds in one] for one in work]
  attempts, begun = [0] * pods, [0.0] * pods
  events, now, r = [], 0.0, 0
  sent = {}  # of the open round: when, by pod
  late = {}  # pods that wait for the others to end it: since when
  missing = set()  # expected, and without a message
  complete = math.inf  # when it had its quorum
  found = {name: [] for name in ("at", "wait", "until_quorum", "counted")}
  sums = dict.fromkeys(("made", "worked", "waited", "graced", "polls", "graced_polls"), 0.0)
  life = lambda: rng.exponential(HOUR / failures[0]) if failures[0] else math.inf
  dies = [life() for _ in range(pods)]

  def begin(i):
    """A pod works on the open round. If it has died or dies in it, it joins when it is back."""
    took = work[i][attempts[i] % len(work[i])]
    attempts[i] += 1
    begun[i] = now
    if dies[i] < now + took:
      back = max(now, dies[i] + rng.exponential(failures[1]))
      dies[i] = back + life()
      heapq.heappush(events, (back, RETURNS, i, r))
    else:
      heapq.heappush(events, (now + took, SENDS, i, r))

  def waited(since):
    before = max(0.0, min(now, complete) - since)
    polls, all_polls = num_polls(before), num_polls(now - since)
    found = before, now - since - before, polls, all_polls - polls
    for name, value in zip(("waited", "graced", "polls", "graced_polls"), found):
      sums[name] += value

  for i in range(pods):
    begin(i)
  while r < rounds:
    now, what, i, q = heapq.heappop(events)
    decided = what == DECIDES and q == r
    if what == RETURNS:
      begin(i)
    elif what == BEGINS_ALONE and q == r and i in late:
      waited(late.pop(i))
      if dies[i] >= now:
        missing.add(i)  # its mark says that it was late
      begin(i)
    elif what == SENDS:
      sums["made"] += 1
      if q < r - 1:
        begin(i)  # `OutOfStepError`: the files are gone, and it joins again
      elif q == r - 1:
        late[i] = now
        until = now + min(2 * (now - begun[i]), TIMEOUT)
        heapq.heappush(events, (until, BEGINS_ALONE, i, r))
      else:
        sent[i] = now
        missing.discard(i)
        if len(sent) == quorum:
          complete = now
        if len(sent) >= quorum:
          decided = r > 0 and not missing
          # A grace begins when its pod sees the quorum. That of a late one ends after the others'.
          seen_by = sent if len(sent) == quorum else (i,)
          graces = [(sent[j] - begun[j]) / 4 if grace is None else grace for j in seen_by]
          heapq.heappush(events, (now + min(graces), DECIDES, i, r))
    if decided:
      first = min(sent.values())
      for name, value in zip(found, (now, now - first, complete - first, len(sent))):
        found[name].append(value)
      sums["worked"] += sum(sent[j] - begun[j] for j in sent)
      ready = sent | late
      missing = {*sent, *(j for j in late if dies[j] >= now)}
      for since in ready.values():
        waited(since)
      sent, late, complete, r = {}, {}, math.inf, r + 1
      for j in ready:
        begin(j)
  return {name: np.array(values) for name, values in found.items()} | sums


def num_polls(waited, shortest=Bucket.pause):
  """How often a pod polls in so many seconds."""
  grows, ends = shortest / SHARE, LONGEST * shortest / SHARE
  growth = math.log(min(max(waited, grows), ends) / grows) / math.log1p(SHARE)
  return min(waited, grows) / shortest + growth + max(0.0, waited - ends) / (LONGEST * shortest)


def scenario(pods, failures, spread, quorum, grace, rounds=7 * DAY, seed=0):
  """A row of the table of simulated rounds."""
  rng = np.random.default_rng(seed)
  work = WORK * np.exp(spread * rng.standard_normal((pods, 64)))
  found = simulate(work, QUORUMS[quorum](pods), grace, rounds, FAILURES[failures], seed + 1)
  wait, counted, elapsed = found["wait"], found["counted"], found["at"][-1]
  return {
    "pods": pods,
    "failures": failures,
    "spread": spread,
    "quorum": quorum,
    "grace": "quarter" if grace is None else grace,
    "wait_median": float(np.median(wait)),
    "wait_99": float(np.percentile(wait, 99)),
    "counted": float(counted.sum() / found["made"]),
    "useful_time": float(found["worked"] / (pods * elapsed)),
    "rounds_per_hour": float(rounds / elapsed * HOUR),
    "missing_mean": float(pods - counted.mean()),
    "missing_max": int(pods - counted.min()),
    "no_quorum": float(np.mean(found["until_quorum"] > TIMEOUT)),
    "polls": float(found["polls"] / (pods * rounds)),
    "graced_polls": float(found["graced_polls"] / (pods * rounds)),
  }


def requests(pods, polls=0, graced_polls=0, decides=False, writes_center=False):
  """What one of `pods` on time asks of its store in a round, except the first.

  Before a quorum it looks in vain `polls` times, and then `graced_polls` times. It may be the first
  to decide the round, and the one to write the next center, who reads the one before it and deletes
  an old round.
  """
  pages, looks = math.ceil(pods / PAGE), polls + graced_polls + 1
  return {
    "put": 1 + decides + writes_center,
    # Decisions: before its message, at each look, of the previous round, and of the next.
    "get": 1 + looks + 1 + 1 + decides + pods + writes_center,
    # Snapshots, at each look; the messages of this round, and of the previous one.
    "list": looks
    + pages * (polls + 2 * graced_polls + 2 * decides + 1)
    + writes_center * (pages + 4),
    "delete": writes_center * (pods + 3),
  }


def sizes(pods, parameters):
  """Bytes of a message, of a center with its outer momentum, and of a decision."""
  codec = ow.codecs.quantize(8)
  tx = ow.diloco(optax.sgd(1.0), None, communication_period=None, codec=codec)
  params = jax.ShapeDtypeStruct((parameters,), jnp.float32)
  center = jax.eval_shape(lambda p: ow.exchange.snapshot(tx.init(p)), params)
  line = len(f"pod-{pods} {RUN} {'0' * 64}\n")  # a name, a round, a digest
  return {
    "message": codec.num_bytes(parameters),
    "center": sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(center)),
    "decision": pods * line,
    "most_pods": (LARGEST_DECISION - LARGEST_FRAME) // line,
  }


def on_paper(pods, parameters, polls=0.0, graced_polls=0.0):
  """Bytes, files, requests and dollars of a pod's round in which it polls so many times."""
  size = sizes(pods, parameters)
  asked = requests(pods, polls, graced_polls)
  dollars = sum(PRICES[name] * number for name, number in asked.items())
  read = pods * size["message"] + size["decision"]
  return {
    "pods": pods,
    "parameters": parameters,
    "written": size["message"],
    "center": size["center"],  # written and read by one pod
    "read": read,
    "read_in_run": RUN * pods * read,
    "files": pods + 2,
    **asked,
    "dollars_per_pod_and_day": DAY * dollars,
    "dollars_of_run": RUN * pods * dollars,
    "reading": pods * size["message"] / SPEED / WORK,
    "reading_in_tree": 2 * math.ceil(math.sqrt(pods)) * size["message"] / SPEED / WORK,
  }


def most_pods(parameters, share=0.1):
  """The most pods of which all read all messages within a share of a round of work."""
  return int(share * WORK * SPEED / sizes(1, parameters)["message"])


def rows(found):
  """Text in columns."""
  plain = lambda x: x if isinstance(x, str) else f"{x:,.0f}" if x >= 1000 else f"{x:.3g}"
  text = [list(found[0])] + [[plain(x) for x in one.values()] for one in found]
  widths = [max(map(len, column)) for column in zip(*text)]
  return "\n".join("  ".join(x.rjust(w) for x, w in zip(line, widths)) for line in text)


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--json", action="store_true", help="print JSON, not tables")
  parser.add_argument("--pods", type=int, nargs="+", default=[64, 1000])
  args = parser.parse_args()
  arms = itertools.product(args.pods, FAILURES, SPREADS, QUORUMS, GRACES)
  found = [scenario(*arm) for arm in arms]
  usual = {"failures": "reserved", "spread": 0.01, "quorum": "half", "grace": 60.0}
  polls = [x for x in found if usual.items() <= x.items()]
  paper = [
    on_paper(x["pods"], n, x["polls"], x["graced_polls"]) for x in polls for n in (10**8, 10**9)
  ]
  limits = {"read_within_a_tenth": most_pods(10**9), "decision": sizes(1000, 1)["most_pods"]}
  if args.json:
    print(json.dumps({"rounds": found, "on_paper": paper, "most_pods": limits}, indent=1))
  else:
    print(rows(found), rows(paper), rows([limits]), sep="\n\n")


if __name__ == "__main__":
  main()
