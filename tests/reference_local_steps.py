"""Published local-update training algorithms, simulated in plain NumPy float64.

An independent reference: nothing here is shared with the code under test, and nothing of that code
is imported. Every algorithm is written out on its own, in the symbols and the order of its paper,
and not as an instance of one general function: two of them may well be the same mathematics.

Every simulator is `name(start, grad, steps, inner, *, num_workers, ...) -> (xs, centers)`:

* start: [n], where all workers start; grad(t, x): the step from 0 and the workers [W, n], to their
  gradients [W, n]; steps: how many inner steps; inner: one of the optimizers below.
* period: the inner steps of a round. The exchange comes after the last of them, from the moved
  parameters, unless the function says otherwise.
* xs: a list of [W, n], the workers after each step, the exchange included if one came in it.
  centers: a list of [n], the center at the same times, or None where the algorithm keeps none.
"""

import numpy as np

# ---- the workers' own optimizers, all workers at once ------------------------------------------


class _Inner:
  """A state is a dict of arrays whose first axis is the workers; every entry starts at zero."""

  def __init__(self, rate):
    self.rate = rate

  def init(self, x):
    return {"count": np.zeros(len(x), np.int64)}

  def update(self, g, state, x):
    raise NotImplementedError

  def reset(self, state, who):
    """The state with the workers of the bool array `who` fresh."""
    who = np.asarray(who, bool)
    new = {name: entry.copy() for name, entry in state.items()}
    for entry in new.values():
      entry[who] = 0
    return new

  def average(self, state):
    """The state with its floating-point entries replaced by their means over the workers."""
    return {
      name: _all_at(entry.mean(axis=0), len(entry)) if entry.dtype.kind == "f" else entry
      for name, entry in state.items()
    }

  def _rates(self, state):
    """[W, 1]; a schedule is read at each worker's own count, from 0."""
    count = state["count"]
    if callable(self.rate):
      return np.array([[float(self.rate(int(k)))] for k in count])
    return np.full((len(count), 1), float(self.rate))


class Sgd(_Inner):
  def update(self, g, state, x):
    return -self._rates(state) * g, {"count": state["count"] + 1}


class Momentum(_Inner):
  """PyTorch's and Optax's form: m <- g + mu m, the rate outside the buffer."""

  def __init__(self, rate, decay, nesterov=False):
    super().__init__(rate)
    self.decay, self.nesterov = decay, nesterov

  def init(self, x):
    return {**super().init(x), "m": np.zeros(x.shape)}

  def update(self, g, state, x):
    m = g + self.decay * state["m"]
    direction = g + self.decay * m if self.nesterov else m
    return -self._rates(state) * direction, {"count": state["count"] + 1, "m": m}


class Adam(_Inner):
  """Optax's form: both moments bias-corrected, eps added outside of the square root."""

  def __init__(self, rate, b1=0.9, b2=0.999, eps=1e-8):
    super().__init__(rate)
    self.b1, self.b2, self.eps = b1, b2, eps

  def init(self, x):
    return {**super().init(x), "m": np.zeros(x.shape), "v": np.zeros(x.shape)}

  def _direction(self, g, state):
    k = state["count"] + 1
    m = self.b1 * state["m"] + (1 - self.b1) * g
    v = self.b2 * state["v"] + (1 - self.b2) * g**2
    m_hat = m / (1 - self.b1**k)[:, None]
    v_hat = v / (1 - self.b2**k)[:, None]
    return m_hat / (np.sqrt(v_hat) + self.eps), {"count": k, "m": m, "v": v}

  def update(self, g, state, x):
    direction, new = self._direction(g, state)
    return -self._rates(state) * direction, new


class AdamW(Adam):
  """Adam with Optax's decoupled weight decay, which the rate multiplies too."""

  def __init__(self, rate, b1=0.9, b2=0.999, eps=1e-8, weight_decay=1e-4):
    super().__init__(rate, b1, b2, eps)
    self.weight_decay = weight_decay

  def update(self, g, state, x):
    direction, new = self._direction(g, state)
    return -self._rates(state) * (direction + self.weight_decay * x), new


# ---- helpers -----------------------------------------------------------------------------------


def _all_at(point, num_workers):
  """[n] -> [W, n], every worker at the one point (a copy each)."""
  return np.tile(point, (num_workers, 1))


def _begin(start, num_workers, inner):
  start = np.array(start, np.float64)
  x = _all_at(start, num_workers)
  return start, x, inner.init(x)


def _gradients(grad, t, x):
  return np.asarray(grad(t, x.copy()), np.float64)


def _inner_step(grad, t, x, inner, state):
  """Every worker's own step: its new parameters, in an array of their own, and its new state."""
  update, state = inner.update(_gradients(grad, t, x), state, x)
  return x + update, state


def _pod_means(rows, pods):
  """[W, n] -> [W, n], every row replaced by the mean of its pod."""
  means = np.empty_like(rows)
  for pod in pods:
    means[pod] = rows[pod].mean(axis=0)
  return means


# ---- averages of the parameters ----------------------------------------------------------------


def local_sgd(start, grad, steps, inner, *, num_workers, period):
  """Local SGD (Stich, arXiv:1805.09767, Algorithm 1): x_i <- mean x where `period` divides t."""
  _, x, state = _begin(start, num_workers, inner)
  xs = []
  for t in range(steps):
    x, state = _inner_step(grad, t, x, inner, state)
    if (t + 1) % period == 0:
      x = _all_at(x.mean(axis=0), num_workers)
    xs.append(x)
  return xs, None


def local_sgd_schedule(start, grad, steps, inner, *, num_workers, period_of):
  """Local SGD whose periods change: period_of(step from 0 at which the round begins)."""
  _, x, state = _begin(start, num_workers, inner)
  xs = []
  exchange_after = period_of(0)
  for t in range(steps):
    x, state = _inner_step(grad, t, x, inner, state)
    if t + 1 == exchange_after:
      x = _all_at(x.mean(axis=0), num_workers)
      exchange_after += period_of(t + 1)
    xs.append(x)
  return xs, None


def qsr(start, grad, steps, inner, *, num_workers, alpha, rates, h_base, warmup, h_warmup):
  """The quadratic synchronization rule (Gu et al., arXiv:2310.14423, Algorithm 2).

  A round that begins after s steps has max(h_base, floor((alpha / rates[s])^2)) steps, h_warmup of
  them while the rate warms up, and at most those that remain.
  """
  _, x, state = _begin(start, num_workers, inner)
  xs = []
  while len(xs) < steps:
    s = len(xs)
    length = h_warmup if s < warmup else max(h_base, int(np.floor((alpha / rates[s]) ** 2)))
    for _ in range(min(length, steps - s)):
      x, state = _inner_step(grad, len(xs), x, inner, state)
      xs.append(x)
    x = _all_at(x.mean(axis=0), num_workers)
    xs[-1] = x
  return xs, None


def post_local_sgd_gradients(start, grad, steps, inner, *, num_workers, period, warmup):
  """Post-local SGD (Lin et al., arXiv:1808.07217) as PyTorch's communication hook has it.

  In the first `warmup` steps all optimizers get the mean gradient, so that also their states stay
  equal; then local SGD, whose rounds are counted from there.
  """
  _, x, state = _begin(start, num_workers, inner)
  xs = []
  for t in range(min(warmup, steps)):
    g = _all_at(_gradients(grad, t, x).mean(axis=0), num_workers)
    update, state = inner.update(g, state, x)
    x = x + update
    xs.append(x)
  for t in range(warmup, steps):
    x, state = _inner_step(grad, t, x, inner, state)
    if (t - warmup) % period == period - 1:
      x = _all_at(x.mean(axis=0), num_workers)
    xs.append(x)
  return xs, None


def post_local_sgd_parameters(start, grad, steps, inner, *, num_workers, period, warmup):
  """Post-local SGD (Lin et al., arXiv:1808.07217) as its authors' code has it (epfml).

  H(t) = 1 in the first `warmup` steps, that is the parameters are averaged after every one of
  them while every optimizer sees its own gradients; after them H(t) = period.
  """
  _, x, state = _begin(start, num_workers, inner)
  xs = []
  local = 0
  for t in range(steps):
    x, state = _inner_step(grad, t, x, inner, state)
    local += 1
    if local == (1 if t < warmup else period):
      x = _all_at(x.mean(axis=0), num_workers)
      local = 0
    xs.append(x)
  return xs, None


def hierarchical_periods(start, grad, steps, inner, *, num_workers, period_pod, period_all, pods):
  """Hierarchical local SGD (arXiv:1808.07217, 2010.12998; PyTorch's HierarchicalModelAverager).

  The mean inside of each pod every `period_pod` steps, over all workers every `period_all` steps;
  where both fall together, only the latter. Both count from the first step.
  """
  _, x, state = _begin(start, num_workers, inner)
  xs = []
  for t in range(steps):
    x, state = _inner_step(grad, t, x, inner, state)
    if (t + 1) % period_all == 0:
      x = _all_at(x.mean(axis=0), num_workers)
    elif (t + 1) % period_pod == 0:
      x = _pod_means(x, pods)
    xs.append(x)
  return xs, None


# ---- outer momentum ----------------------------------------------------------------------------


def diloco(start, grad, steps, inner, *, num_workers, period, eta, mu):
  """DiLoCo (Douillard et al., arXiv:2311.08105, Algorithm 1).

  The outer gradient is Delta = theta - mean theta_i; OuterOpt is torch.optim.SGD(eta, mu,
  nesterov=True), whose rate is outside of the buffer.
  """
  theta, x, state = _begin(start, num_workers, inner)
  buffer = np.zeros_like(theta)
  xs, centers = [], []
  for t in range(steps):
    x, state = _inner_step(grad, t, x, inner, state)
    if (t + 1) % period == 0:
      delta = (theta - x).mean(axis=0)
      buffer = mu * buffer + delta
      nesterov = delta + mu * buffer
      theta = theta - eta * nesterov
      x = _all_at(theta, num_workers)
    xs.append(x)
    centers.append(theta)
  return xs, centers


def pier(start, grad, steps, inner, *, num_workers, period, eta, mu_of):
  """Pier (arXiv:2511.17849): DiLoCo whose outer momentum is mu_of[r] in round r."""
  theta, x, state = _begin(start, num_workers, inner)
  buffer = np.zeros_like(theta)
  xs, centers = [], []
  for t in range(steps):
    x, state = _inner_step(grad, t, x, inner, state)
    if (t + 1) % period == 0:
      mu = mu_of[t // period]
      delta = theta - x.mean(axis=0)
      buffer = mu * buffer + delta
      theta = theta - eta * (delta + mu * buffer)
      x = _all_at(theta, num_workers)
    xs.append(x)
    centers.append(theta)
  return xs, centers


def muloco(start, grad, steps, inner, *, num_workers, period, eta, mu):
  """MuLoCo (Therien et al., arXiv:2505.23725): Nesterov with the rate inside of the buffer."""
  c, x, state = _begin(start, num_workers, inner)
  b = np.zeros_like(c)
  xs, centers = [], []
  for t in range(steps):
    x, state = _inner_step(grad, t, x, inner, state)
    if (t + 1) % period == 0:
      d = c - x.mean(axis=0)
      b = mu * b + eta * d
      c = c - mu * b - eta * d
      x = _all_at(c, num_workers)
    xs.append(x)
    centers.append(c)
  return xs, centers


def delayed_outer(start, grad, steps, inner, *, num_workers, period, eta, mu):
  """Delayed outer gradients (arXiv:2502.12996, Algorithm 2).

  Round r's outer gradient is reduced while round r + 1 computes: the outer step at the end of
  round r takes that of round r - 1, in round 1 zeros. The workers go to the center every time.
  """
  theta, x, state = _begin(start, num_workers, inner)
  deltas = [np.zeros_like(theta)]  # by round, from the zeros in the place of round 0
  m = np.zeros_like(theta)
  xs, centers = [], []
  for t in range(steps):
    x, state = _inner_step(grad, t, x, inner, state)
    r, left = divmod(t + 1, period)
    if left == 0:
      deltas.append(theta - x.mean(axis=0))
      received = deltas[r - 1]
      m = received + mu * m
      theta = theta - eta * (received + mu * m)
      x = _all_at(theta, num_workers)
    xs.append(x)
    centers.append(theta)
  return xs, centers


def slowmo(start, grad, steps, inner, *, num_workers, period, beta, a, gamma):
  """SlowMo (Wang et al., arXiv:1910.00643, Algorithm 1), base optimizers kept.

  gamma(round from 0) is the fast learning rate; `a` (alpha in the paper) is the slow one.
  """
  c, x, state = _begin(start, num_workers, inner)
  u = np.zeros_like(c)
  xs, centers = [], []
  for t in range(steps):
    x, state = _inner_step(grad, t, x, inner, state)
    if (t + 1) % period == 0:
      rate = gamma((t + 1) // period - 1)
      u = beta * u + (c - x.mean(axis=0)) / rate
      c = c - a * rate * u
      x = _all_at(c, num_workers)
    xs.append(x)
    centers.append(c)
  return xs, centers


def bmuf(start, grad, steps, inner, *, num_workers, period, eta, nesterov, zeta=1.0):
  """Blockwise model-update filtering (Chen and Huo, ICASSP 2016).

  G = mean W_i - W_g; Delta <- eta Delta + zeta G; W <- W + Delta. The next block starts at
  W_g = W (classical block momentum) or W_g = W + eta Delta (Nesterov's). The centers are the W_g:
  what the workers have been given.
  """
  w_global, x, state = _begin(start, num_workers, inner)
  w_start = w_global
  delta = np.zeros_like(w_global)
  xs, centers = [], []
  for t in range(steps):
    x, state = _inner_step(grad, t, x, inner, state)
    if (t + 1) % period == 0:
      block_update = x.mean(axis=0) - w_start
      delta = eta * delta + zeta * block_update
      w_global = w_global + delta
      w_start = w_global + eta * delta if nesterov else w_global
      x = _all_at(w_start, num_workers)
    xs.append(x)
    centers.append(w_start)
  return xs, centers


def snoo(start, grad, steps, inner, *, num_workers, period, eta, mu):
  """SNOO (Kallusky et al., arXiv:2510.15830): every worker by itself, w the slow weights.

  s = w - w_K, the displacement of K steps; b <- mu b + s; w <- w - eta (mu b + s).
  """
  _, fast, state = _begin(start, num_workers, inner)
  slow, b = fast.copy(), np.zeros_like(fast)
  xs = []
  for t in range(steps):
    fast, state = _inner_step(grad, t, fast, inner, state)
    if (t + 1) % period == 0:
      s = slow - fast
      b = mu * b + s
      slow = slow - eta * (mu * b + s)
      fast = slow.copy()
    xs.append(fast)
  return xs, None


def gpa(start, grad, steps, inner, *, num_workers, mu_y, mu_x):
  """GPA (arXiv:2512.17131): the gradient at y, the inner step from z, the mean x to evaluate.

  z <- z + inner(grad(y)); x <- mu_x x + (1 - mu_x) z; y <- mu_y x + (1 - mu_y) z. `mu_x` may be a
  function of the step, from 1. The centers are the x of all workers, [W, n].
  """
  _, y, state = _begin(start, num_workers, inner)
  x, z = y.copy(), y.copy()
  ys, means = [], []
  for t in range(steps):
    move, state = inner.update(_gradients(grad, t, y), state, z)
    z = z + move
    keep = mu_x(t + 1) if callable(mu_x) else mu_x
    x = keep * x + (1 - keep) * z
    y = mu_y * x + (1 - mu_y) * z
    ys.append(y)
    means.append(x)
  return ys, means


def eager(start, grad, steps, inner, *, num_workers, period, eta, mu):
  """Eager updates (arXiv:2502.12996), with a center and a momentum of each worker's own.

  D_i(r) = c_i - x_i; E = mean D(r-1) + (D_i(r) - D_i(r-1)) / W; b <- mu b + E;
  c <- c - eta (mu b + E). Before the first round all are zero.
  """
  _, x, state = _begin(start, num_workers, inner)
  center, b, own = x.copy(), np.zeros_like(x), np.zeros_like(x)
  late = np.zeros(x.shape[1])
  xs = []
  for t in range(steps):
    x, state = _inner_step(grad, t, x, inner, state)
    if (t + 1) % period == 0:
      fresh = center - x
      pseudo = late + (fresh - own) / num_workers
      b = mu * b + pseudo
      center = center - eta * (mu * b + pseudo)
      own, late = fresh, fresh.mean(axis=0)
      x = center.copy()
    xs.append(x)
  return xs, None


def asynchronous_by_time(
  start, grad, steps, inner, *, num_workers, period, durations, eta, beta, buffer, weight
):
  """Asynchronous local SGD (arXiv:2401.09135, Algorithms 1 and 3), by a queue of times.

  A worker of duration k takes a step in every k-th tick, and pushes s - x after `period` of them.
  The server weighs it by its age; those pushed in one tick it averages. Delayed Nesterov, c = 0,
  the N-th of a buffer: m <- beta m + sum / N; theta <- theta - eta (beta m + d / N).
  """
  theta, x, state = _begin(start, num_workers, inner)
  began, version = x.copy(), np.zeros(num_workers, int)
  due = [period * k for k in durations]
  m, total, updates = np.zeros_like(theta), np.zeros_like(theta), 0
  xs, centers = [], []
  for t in range(steps):
    works = np.array([t % k == 0 for k in durations])
    new, new_state = _inner_step(grad, t, x, inner, state)
    x = np.where(works[:, None], new, x)
    state = {
      key: np.where(works.reshape(-1, *[1] * (entry.ndim - 1)), entry, state[key])
      for key, entry in new_state.items()
    }
    pushed = [i for i in range(num_workers) if due[i] == t + 1]
    if pushed:
      d = sum(weight(updates - version[i]) * (began[i] - x[i]) for i in pushed) / len(pushed)
      updates, total = updates + 1, total + d
      if updates % buffer == 0:
        m, total = beta * m + total / buffer, np.zeros_like(theta)
        theta = theta - eta * (beta * m + d / buffer)
      else:
        theta = theta - eta * d / buffer
    for i in pushed:
      x[i] = began[i] = theta
      version[i], due[i] = updates, t + 1 + period * durations[i]
    xs.append(x.copy())
    centers.append(theta)
  return xs, centers


def noloco(start, grad, steps, inner, *, num_workers, period, alpha, beta, gamma, partners):
  """NoLoCo (arXiv:2506.10911), by its authors' program (gensyn-ai/noloco, a1b4a42).

  delta <- alpha delta + beta mean(x - phi) + gamma (mean phi - phi); phi <- phi + delta; x <- phi;
  means over a worker and its partner, `partners(r)[i]` in round r.
  """
  _, x, state = _begin(start, num_workers, inner)
  phi, delta = x.copy(), np.zeros_like(x)
  xs = []
  for t in range(steps):
    x, state = _inner_step(grad, t, x, inner, state)
    if (t + 1) % period == 0:
      other = partners((t + 1) // period - 1)
      gain, apart = x - phi, phi[other] / 2 - phi / 2
      delta = alpha * delta + beta * (gain + gain[other]) / 2 + gamma * apart
      phi = phi + delta
      x = phi.copy()
    xs.append(x)
  return xs, None


def lookahead(start, grad, steps, inner, *, num_workers=1, period, alpha):
  """Lookahead (Zhang et al., arXiv:1907.08610, Algorithm 1): one worker and its slow weights."""
  assert num_workers == 1
  slow, fast, state = _begin(start, 1, inner)
  xs, centers = [], []
  for t in range(steps):
    fast, state = _inner_step(grad, t, fast, inner, state)
    if (t + 1) % period == 0:
      slow = slow + alpha * (fast[0] - slow)
      fast = slow[None].copy()
    xs.append(fast)
    centers.append(slow)
  return xs, centers


def diloco_inner_state(start, grad, steps, inner, *, num_workers, period, eta, mu, policy):
  """DiLoCo; what becomes of the inner states at an exchange is `policy`.

  "keep"; "reset": all fresh, counts too; "average": the floating-point entries (momentum, Adam's
  moments) become their means over the workers, the counts stay. (SlowMo, arXiv:1910.00643,
  compares the three as its buffer strategies.)
  """
  theta, x, state = _begin(start, num_workers, inner)
  m = np.zeros_like(theta)
  xs, centers = [], []
  for t in range(steps):
    x, state = _inner_step(grad, t, x, inner, state)
    if (t + 1) % period == 0:
      delta = theta - x.mean(axis=0)
      m = delta + mu * m
      theta = theta - eta * (delta + mu * m)
      x = _all_at(theta, num_workers)
      if policy == "reset":
        state = inner.reset(state, np.ones(num_workers, bool))
      elif policy == "average":
        state = inner.average(state)
      else:
        assert policy == "keep"
    xs.append(x)
    centers.append(theta)
  return xs, centers


def des_loc(start, grad, steps, inner, *, num_workers, k_x, k_u, k_v):
  """DES-LOC (Iacob et al., arXiv:2505.22549) round Adam: the parameters, the first and the second
  moment each become their mean over the workers where their own period divides the step.

  The paper averages at the start of the next step; here as everywhere in this file after this one.
  """
  _, x, state = _begin(start, num_workers, inner)
  xs = []
  for t in range(1, steps + 1):
    x, state = _inner_step(grad, t - 1, x, inner, state)
    if t % k_x == 0:
      x = _all_at(x.mean(axis=0), num_workers)
    if t % k_u == 0:
      state = state | {"m": _all_at(state["m"].mean(axis=0), num_workers)}
    if t % k_v == 0:
      state = state | {"v": _all_at(state["v"].mean(axis=0), num_workers)}
    xs.append(x)
  return xs, None


def diloco_participation(
  start, grad, steps, inner, *, num_workers, period, eta, mu, weights, absent
):
  """DiLoCo whose workers may be missing: weights(step from 0) -> [W], read at an exchange.

  The outer gradient is the weighted mean over the workers of weight > 0; the others' parameters,
  NaN or not, are not looked at. A worker of weight 0 takes the center too (absent="pull") or goes
  on alone (absent="keep"). With all weights 0 the center and its momentum stand still.
  """
  assert absent in ("pull", "keep")
  theta, x, state = _begin(start, num_workers, inner)
  m = np.zeros_like(theta)
  xs, centers = [], []
  for t in range(steps):
    x, state = _inner_step(grad, t, x, inner, state)
    if (t + 1) % period == 0:
      w = np.asarray(weights(t), np.float64)
      present = np.flatnonzero(w > 0)
      if len(present):
        delta = np.zeros_like(theta)
        for i in present:
          delta += w[i] / w[present].sum() * (theta - x[i])
        m = delta + mu * m
        theta = theta - eta * (delta + mu * m)
      pulled = present if absent == "keep" else np.arange(num_workers)
      x[pulled] = theta
    xs.append(x)
    centers.append(theta)
  return xs, centers


# ---- fragments and overlap ---------------------------------------------------------------------


def streaming_diloco(
  start, grad, steps, inner, *, num_workers, period, eta, mu, alpha, delay, fragments
):
  """Streaming DiLoCo (Douillard et al., arXiv:2501.18512, Algorithm 2), t from 1 as there.

  Fragment p (an array of indices) is sent at the steps t = t_p mod H, t_p = floor((p + 1) H / P).
  Its outer gradient, of the snapshot at the send, is received `delay` steps later: there the outer
  step is taken and theta_{i,p} <- alpha theta_{i,p} + (1 - alpha) theta_p.
  """
  assert period >= len(fragments) and 0 <= delay <= period
  phases = [(p + 1) * period // len(fragments) for p in range(len(fragments))]
  theta, x, state = _begin(start, num_workers, inner)
  momentum = [np.zeros(len(f)) for f in fragments]
  in_flight = {}  # (fragment, step of arrival): its outer gradient

  def receive(p, t, x):
    if (p, t) in in_flight:
      f, delta = fragments[p], in_flight.pop((p, t))
      momentum[p] = delta + mu * momentum[p]
      theta[f] -= eta * (delta + mu * momentum[p])
      x[:, f] = alpha * x[:, f] + (1 - alpha) * theta[f]

  xs, centers = [], []
  for t in range(1, steps + 1):
    x, state = _inner_step(grad, t - 1, x, inner, state)
    for p, f in enumerate(fragments):
      receive(p, t, x)  # of a delay of a whole period: before the next send
      if (t - phases[p]) % period == 0:
        in_flight[p, t + delay] = (theta[f] - x[:, f]).mean(axis=0)
      receive(p, t, x)  # of a delay of 0
    xs.append(x)
    centers.append(theta.copy())
  return xs, centers


def streaming_diloco_early(
  start, grad, steps, inner, *, num_workers, period, eta, mu, alpha, delay, fragments
):
  """Streaming DiLoCo as MaxText computes it: the same workers, another center in between.

  The center and the outer state of a fragment move at once at its send; only the workers wait,
  and merge with the center `delay` steps later.
  """
  assert period >= len(fragments) and 0 <= delay <= period
  c, x, state = _begin(start, num_workers, inner)
  trace = np.zeros_like(c)
  countdown = np.full(len(fragments), -1)
  xs, centers = [], []
  for t in range(steps):
    x, state = _inner_step(grad, t, x, inner, state)
    in_round = t % period + 1
    for p, f in enumerate(fragments):
      merge = False
      if countdown[p] > 0:
        countdown[p] -= 1
        merge = countdown[p] == 0
      if merge:
        x[:, f] += (1 - alpha) * (c[f] - x[:, f])
      if in_round == (p + 1) * period // len(fragments):
        d = c[f] - x[:, f].mean(axis=0)
        trace[f] = d + mu * trace[f]
        c[f] = c[f] - eta * (d + mu * trace[f])
        if delay == 0:
          x[:, f] += (1 - alpha) * (c[f] - x[:, f])
        else:
          countdown[p] = delay
    xs.append(x)
    centers.append(c.copy())
  return xs, centers


def torchft_diloco(start, grad, steps, inner, *, num_workers, period, eta, mu, alpha, fragments):
  """torchft's local_sgd.DiLoCo with fragment_sync_delay 0, replica by replica.

  A sub-round has period / P steps (no rest) and ends with fragment (sub-round mod P): the
  pseudo-gradients original - local are averaged, every replica restores its backup, takes its own
  outer SGD step, saves the result as the new backup, and mixes: lerp(new, local, alpha).
  """
  assert period % len(fragments) == 0
  sync_every = period // len(fragments)
  _, x, state = _begin(start, num_workers, inner)
  originals = x.copy()
  buffers = np.zeros_like(x)
  local_step = fragment = 0
  xs, centers = [], []
  for t in range(steps):
    x, state = _inner_step(grad, t, x, inner, state)
    local_step += 1
    if local_step == sync_every:
      f = fragments[fragment]
      averaged = sum(originals[i, f] - x[i, f] for i in range(num_workers)) / num_workers
      for i in range(num_workers):
        local = x[i, f]
        buffers[i, f] = mu * buffers[i, f] + averaged
        originals[i, f] = originals[i, f] - eta * (averaged + mu * buffers[i, f])
        x[i, f] = originals[i, f] + alpha * (local - originals[i, f])
      local_step, fragment = 0, (fragment + 1) % len(fragments)
    xs.append(x)
    centers.append(originals[0].copy())
  return xs, centers


def sparse_loco(
  start, grad, steps, inner, *, num_workers, period, eta, beta, chunk, k, num_values, exact
):
  """SparseLoCo (Sarfi et al., arXiv:2508.15706): e_i <- beta e_i + Delta_i; q_i = Q(TopK(e_i));
  e_i <- e_i - q_i; theta <- theta - eta mean q_i.

  TopK has the k largest of each `chunk` entries in their order; Q rounds each `num_values` of them,
  the largest first, to s times -1, 0 or 1, where s is their largest. The entries `exact` are sent
  as they are.
  """
  theta, x, state = _begin(start, num_workers, inner)
  e = np.zeros_like(x)
  xs, centers = [], []
  for t in range(steps):
    x, state = _inner_step(grad, t, x, inner, state)
    if (t + 1) % period == 0:
      q = np.zeros_like(x)
      for i in range(num_workers):
        e[i] = beta * e[i] + (theta - x[i])
        rest = np.setdiff1d(np.arange(len(theta)), exact)
        for first in range(0, len(rest), chunk):
          places = rest[first : first + chunk]
          largest = places[np.argsort(-np.abs(e[i, places]), kind="stable")[:k]]
          for at in range(0, k, num_values):
            chosen = largest[at : at + num_values]
            s = np.abs(e[i, chosen]).max()
            q[i, chosen] = s * np.sign(e[i, chosen]) * (np.abs(e[i, chosen]) > s / 2)
        q[i, exact] = theta[exact] - x[i, exact]
        e[i] -= q[i]
        e[i, exact] = 0
      theta = theta - eta * q.mean(axis=0)
      x = _all_at(theta, num_workers)
    xs.append(x)
    centers.append(theta)
  return xs, centers


def sparse_average(start, grad, steps, inner, *, num_workers, period, delay, masks):
  """LOSCAR-SGD (arXiv:2605.20866): y_i = x_i when round r is sent; `delay` steps later
  x_ij <- x_ij + (mean y_j - y_ij) for the j of S_r, `masks[r]` of bool [n], the same for all.

  With a period of 1 and no delay it is SPARTA (EXO Labs' gym).
  """
  _, x, state = _begin(start, num_workers, inner)
  due, xs = {}, []
  for t in range(steps):
    x, state = _inner_step(grad, t, x, inner, state)
    x = x + due.pop(t, 0)
    if (t + 1) % period == 0:
      change = np.where(masks[(t + 1) // period - 1], x.mean(axis=0) - x, 0)
      if delay:
        due[t + delay] = change
      else:
        x = x + change
    xs.append(x)
  return xs, None


# ---- other means -------------------------------------------------------------------------------


def decoupled_diloco(
  start, grad, steps, inner, *, num_workers, period, eta, mu, weights, fragments, tensors, plain
):
  """The merge of Decoupled DiLoCo (arXiv:2604.21428), at the end of whole rounds of fragments.

  weights(step from 0) -> [W]: tokens times tokens a step. Of each of `tensors`, indices, but the
  `plain` ones: the mean of the norms times the direction of the mean of the directions. Fragment p
  of P is exchanged after every step t with (t + 1) mod period = (p + 1) period / P mod period.
  """
  theta, x, state = _begin(start, num_workers, inner)
  m = np.zeros_like(theta)
  xs, centers = [], []
  for t in range(steps):
    x, state = _inner_step(grad, t, x, inner, state)
    for p, part in enumerate(fragments):
      if (t + 1 - (p + 1) * period // len(fragments)) % period:
        continue
      w = np.asarray(weights(t), np.float64)
      w = w / w.sum()
      for name, tensor in tensors.items():
        if tensor[0] not in part:
          continue
        d = theta[tensor] - x[:, tensor]
        if name in plain:
          merged = w @ d
        else:
          r = np.linalg.norm(d, axis=1)
          direction = w @ (d / r[:, None])
          merged = (w @ r) * direction / np.linalg.norm(direction)
        m[tensor] = mu * m[tensor] + merged
        theta = theta.copy()
        theta[tensor] -= eta * (merged + mu * m[tensor])
        x[:, tensor] = theta[tensor]
    xs.append(x)
    centers.append(theta.copy())
  return xs, centers


class _Detector:
  """ATorch's OnlineDynamicEWMA, a worker's own: which length is too far above those before."""

  def __init__(self, alpha, warmup, threshold):
    self.alpha, self.warmup, self.threshold = alpha, warmup, threshold
    self.mean = self.m2 = 0.0
    self.count, self.scores = 0, []

  def score(self, value):
    if self.m2 == 0 or self.count < self.warmup:
      return 0.0
    return (value - self.mean) / np.sqrt(self.m2)

  def is_outlier(self, value):
    if self.count < self.warmup:
      return False
    factor = max(1.0, np.std(self.scores[-self.warmup :], ddof=1))
    return self.score(value) > self.threshold * factor

  def update(self, value):
    self.count += 1
    delta = value - self.mean
    self.mean += self.alpha * delta
    self.m2 = (1 - self.alpha) * (self.m2 + self.alpha * delta * (value - self.mean))
    self.scores.append(self.score(value))


def edit(start, grad, steps, inner, *, num_workers, period, eta, mu, clip, outliers, **detector):
  """EDiT (Cheng et al., arXiv:2412.07210) without its clock, as ATorch has it with FSDP, the model
  one module: outliers are nulled, the others weighed by softmax(-norm), the sum clipped, and no
  outer step taken where it is zero. What is left out is appended to `outliers`, for each exchange.
  """
  theta, x, state = _begin(start, num_workers, inner)
  m = np.zeros_like(theta)
  detectors = [_Detector(**detector) for _ in range(num_workers)]
  xs, centers = [], []
  for t in range(steps):
    x, state = _inner_step(grad, t, x, inner, state)
    if (t + 1) % period == 0:
      d = theta - x
      norms = np.linalg.norm(d, axis=1)
      out = np.array([one.is_outlier(n) for one, n in zip(detectors, norms)])
      for one, n in zip(detectors, norms):
        one.update(n)
      outliers.append(out)
      d[out] = 0
      logits = -(norms + 1e6 * out)
      w = np.exp(logits - logits.max())
      merged = (w / w.sum()) @ d
      merged = merged * min(1.0, clip / (np.linalg.norm(merged) + 1e-6))
      if np.abs(merged).sum() >= 1e-6:
        m = mu * m + merged
        theta = theta - eta * (merged + mu * m)
      x = _all_at(theta, num_workers)
    xs.append(x)
    centers.append(theta)
  return xs, centers


def asynchronous(start, grad, inner, *, arrivals, period, eta, beta, buffer):
  """Asynchronous local SGD with delayed Nesterov (Liu et al., arXiv:2401.09135), c = 0.

  arrivals: which worker comes next. It has taken `period` steps from where the server was when it
  last came; grad(k, s, x): the gradient at x [n] of the s-th step of the k-th arrival. Returns the
  server after each arrival.
  """
  theta = np.array(start, np.float64)
  states = {i: inner.init(theta[None]) for i in arrivals}
  had = dict.fromkeys(arrivals, theta)
  m, total, found = np.zeros_like(theta), np.zeros_like(theta), []
  for k, i in enumerate(arrivals):
    x = had[i][None].copy()
    for s in range(period):
      update, states[i] = inner.update(grad(k, s, x), states[i], x)
      x = x + update
    delta = had[i] - x[0]
    total = total + delta
    if (k + 1) % buffer == 0:
      m = beta * m + total / buffer
      theta = theta - eta * (beta * m + delta / buffer)
      total = np.zeros_like(theta)
    else:
      theta = theta - eta * delta / buffer
    had[i] = theta
    found.append(theta)
  return found


# ---- federated ---------------------------------------------------------------------------------


def fedavg(start, grad, steps, inner, *, num_workers, period, sizes, server_rate=1.0, momentum=0.0):
  """FedAvg (McMahan et al., arXiv:1602.05629), FedAvgM with momentum (Hsu et al., 1909.06335).

  sizes(round from 0) -> [W], the clients' numbers of examples, 0 for those not sampled. A round
  ends with v <- momentum v + sum_k n_k (w - w_k) / n; w <- w - server_rate v; all clients, also
  those that were not sampled, begin the next one at w with a fresh optimizer.
  """
  w, x, state = _begin(start, num_workers, inner)
  v = np.zeros_like(w)
  xs, centers = [], []
  for t in range(steps):
    x, state = _inner_step(grad, t, x, inner, state)
    if (t + 1) % period == 0:
      n_k = np.asarray(sizes((t + 1) // period - 1), np.float64)
      sampled = np.flatnonzero(n_k)
      # A choice, of which the papers say nothing: in a round without any example neither server nor
      # momentum moves, and the clients begin the next one at w like any other.
      if len(sampled):
        delta = sum(n_k[k] * (w - x[k]) for k in sampled) / sum(n_k[k] for k in sampled)
        v = momentum * v + delta
        w = w - server_rate * v
      x = _all_at(w, num_workers)
      state = inner.init(x)
    xs.append(x)
    centers.append(w)
  return xs, centers


def fedopt(
  start,
  grad,
  steps,
  inner,
  *,
  num_workers,
  period,
  sizes,
  eta,
  v0,
  which="adam",
  b1=0.9,
  b2=0.99,
  eps=1e-3,
  m0=0.0,
  bias_correction=False,
):
  """FedAdam and FedYogi (Reddi et al., arXiv:2003.00295, Algorithm 2), Delta = x_i - x ASCENDED.

  m <- b1 m + (1 - b1) Delta; v <- b2 v + (1 - b2) Delta^2 (Adam) or
  v - (1 - b2) Delta^2 sign(v - Delta^2) (Yogi); x <- x + eta m / (sqrt(v) + eps). The paper's v
  starts at eps^2 or above (`v0`) and its m at 0. With `bias_correction` m and v are divided by
  1 - b^k at the k-th server step, before the root, as in Optax; Optax's yogi starts m and v at
  1e-6, and as it descends -Delta, `m0` is given in the sign of a gradient: m starts at -m0.
  Clients as in `fedavg`, weighted by their examples as in the authors' code.
  """
  server, x, state = _begin(start, num_workers, inner)
  m = np.full_like(server, -m0)
  v = np.full_like(server, v0)
  k = 0
  xs, centers = [], []
  for t in range(steps):
    x, state = _inner_step(grad, t, x, inner, state)
    if (t + 1) % period == 0:
      n = np.asarray(sizes((t + 1) // period - 1), np.float64)
      who = n > 0
      if who.any():  # else the server stands still: see fedavg
        k += 1
        delta = np.average(x[who] - server, axis=0, weights=n[who])
        m = b1 * m + (1 - b1) * delta
        if which == "adam":
          v = b2 * v + (1 - b2) * delta**2
        else:
          assert which == "yogi"
          v = v - (1 - b2) * delta**2 * np.sign(v - delta**2)
        m_hat = m / (1 - b1**k) if bias_correction else m
        v_hat = v / (1 - b2**k) if bias_correction else v
        server = server + eta * m_hat / (np.sqrt(v_hat) + eps)
      x = _all_at(server, num_workers)
      state = inner.init(x)
    xs.append(x)
    centers.append(server)
  return xs, centers


# ---- a parameter server, elastic averages ------------------------------------------------------


def downpour(start, grad, steps, inner, *, num_workers, period):
  """DOWNPOUR (Dean et al., 2012; arXiv:1412.6651, Algorithm 3), all workers in step.

  v_i is the worker's total update since it last pulled. Every `period` steps all push,
  c <- c + sum_i v_i, and then all pull, x_i <- c and v_i <- 0.
  """
  c, x, state = _begin(start, num_workers, inner)
  v = np.zeros_like(x)
  xs, centers = [], []
  for t in range(steps):
    update, state = inner.update(_gradients(grad, t, x), state, x)
    x = x + update
    v = v + update
    if (t + 1) % period == 0:
      c = c + v.sum(axis=0)
      x = _all_at(c, num_workers)
      v = np.zeros_like(x)
    xs.append(x)
    centers.append(c)
  return xs, centers


def crossbow(start, grad, steps, inner, *, num_workers, period, alpha, mu):
  """Synchronous model averaging of CROSSBOW (Koliousis et al., VLDB 2019, Algorithm 1).

  The corrections c_i = alpha (w_i - z) are subtracted from the replicas, and
  z <- z + sum_i c_i + mu (z - z_prev). Here they are of the replicas AFTER their step, as all
  exchanges of this file; the authors' code (lsds/Crossbow, sma.cu) takes them of the replicas
  before the step of the same iteration, which is the phase of `easgd_authors_phase`.
  """
  z, w, state = _begin(start, num_workers, inner)
  z_prev = z
  xs, centers = [], []
  for t in range(steps):
    w, state = _inner_step(grad, t, w, inner, state)
    if (t + 1) % period == 0:
      corrections = alpha * (w - z)
      w = w - corrections
      z, z_prev = z + corrections.sum(axis=0) + mu * (z - z_prev), z
    xs.append(w)
    centers.append(z)
  return xs, centers


def crossbow_authors_phase(start, grad, steps, inner, *, num_workers, period, alpha, mu):
  """The same in the phase of the authors' code: c_i is taken before the step, and subtracted after
  it."""
  z, w, state = _begin(start, num_workers, inner)
  z_prev = z
  xs, centers = [], []
  for t in range(steps):
    corrections = np.zeros_like(w)
    if t % period == 0:
      corrections = alpha * (w - z)
      z, z_prev = z + corrections.sum(axis=0) + mu * (z - z_prev), z
    w, state = _inner_step(grad, t, w, inner, state)
    w = w - corrections
    xs.append(w)
    centers.append(z)
  return xs, centers


def easgd_authors_phase(start, grad, steps, inner, *, num_workers, period, alpha):
  """EASGD (Zhang et al., arXiv:1412.6651, Algorithm 1), all workers in step, in its own phase.

  Where `period` divides the step from 0, the differences are taken BEFORE the step, and the center
  moves; the step uses the gradient at the old parameters; then the elastic force is subtracted.
  """
  center, x, state = _begin(start, num_workers, inner)
  xs, centers = [], []
  for t in range(steps):
    force = np.zeros_like(x)
    if t % period == 0:
      force = alpha * (x - center)
      center = center + force.sum(axis=0)
    x, state = _inner_step(grad, t, x, inner, state)
    x = x - force
    xs.append(x)
    centers.append(center)
  return xs, centers


# ---- two levels --------------------------------------------------------------------------------


def hierarchical_pods(start, grad, steps, inner, *, num_workers, period, pods, eta, mu):
  """DiLoCo (arXiv:2311.08105) between pods whose devices are data-parallel.

  pods: lists of devices. A pod holds one model and one inner state, and steps on the mean of its
  devices' gradients; DiLoCo's workers are the pods, each of which counts once.
  """
  theta, models, state = _begin(start, len(pods), inner)
  pod_of = np.empty(num_workers, int)
  for k, pod in enumerate(pods):
    pod_of[pod] = k
  m = np.zeros_like(theta)
  xs, centers = [], []
  for t in range(steps):
    g = _gradients(grad, t, models[pod_of])
    update, state = inner.update(np.stack([g[pod].mean(axis=0) for pod in pods]), state, models)
    models = models + update
    if (t + 1) % period == 0:
      delta = theta - models.mean(axis=0)
      m = delta + mu * m
      theta = theta - eta * (delta + mu * m)
      models = _all_at(theta, len(pods))
    xs.append(models[pod_of])
    centers.append(theta)
  return xs, centers


def hierarchical_diloco(
  start, grad, steps, inner, *, num_workers, period_pod, period_all, pods, eta, mu
):
  """Local SGD inside of each pod, every `period_pod` steps, and DiLoCo over all workers.

  Every `period_all` steps the outer gradient theta - mean theta_i of all the workers is taken; in
  such a step the pods take no mean of their own. Both periods count from the first step.
  """
  theta, x, state = _begin(start, num_workers, inner)
  m = np.zeros_like(theta)
  xs, centers = [], []
  for t in range(steps):
    x, state = _inner_step(grad, t, x, inner, state)
    if (t + 1) % period_all == 0:
      delta = theta - x.mean(axis=0)
      m = delta + mu * m
      theta = theta - eta * (delta + mu * m)
      x = _all_at(theta, num_workers)
    elif (t + 1) % period_pod == 0:
      x = _pod_means(x, pods)
    xs.append(x)
    centers.append(theta)
  return xs, centers
