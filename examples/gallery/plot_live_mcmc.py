"""
Watching a sampler while it runs
================================

Four NUTS chains of blackjax sample a logistic regression in one compiled scan. Taps
hand each step to the host while the chains run on: a plot of acceptance, step size and
R-hat is drawn again about twice a second. In the end the posterior is compared with
the fit of statsmodels.

Besides hostcall it needs ``pip install blackjax matplotlib statsmodels``.
"""

# %%
# The model
# ---------
#
# statsmodels comes with a survey of married women: which of them had an affair? Each
# third of the 6,366 answers is used. The columns are scaled, and the prior is a wide
# normal distribution.

# sphinx_gallery_tags = ["sampling", "taps", "plots"]
# sphinx_gallery_thumbnail_number = 2

import time
from typing import Any

import blackjax
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import statsmodels.api
from blackjax.adaptation.step_size import dual_averaging_adaptation
from matplotlib.animation import FuncAnimation
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

import hostcall as hc

CHAINS, WARMUP, STEPS = 4, 200, 800

survey: Any = statsmodels.api.datasets.fair.load_pandas().data[::3]
had_affair = survey.pop("affairs").to_numpy() > 0
scaled = (survey - survey.mean()) / survey.std()
X = np.c_[np.ones(len(survey)), scaled].astype(np.float32)
NAMES = ["constant", *survey.columns]
SIGNED = jnp.asarray(X * np.where(had_affair, 1, -1)[:, None])


def log_density(w: jax.Array) -> jax.Array:
    likelihood: jax.Array = jax.nn.log_sigmoid(SIGNED @ w).sum()
    return likelihood - (w**2).sum() / 200


# %%
# The host's side
# ---------------
#
# A monitor gets the values of the steps and keeps running sums, so that R-hat costs the
# same at each step. It draws with Agg on the thread of the taps, since pyplot belongs
# to the main thread. Here the drawings are kept for a film. Written to one file, a
# viewer that reloads it would show the last of them.


class Monitor:
    def __init__(self) -> None:
        self.draws: list[np.ndarray] = []  # (chains, coefficients)
        self.acceptance: list[float] = []
        self.step_size: list[float] = []
        self.r_hat: list[float] = []
        self.frames: list[np.ndarray] = []
        self.count = 0
        self.mean = np.zeros((CHAINS, len(NAMES)))
        self.squares = np.zeros((CHAINS, len(NAMES)))

    def see(self, w: np.ndarray, acceptance: np.ndarray, size: np.ndarray) -> None:
        """Gets up to 256 steps at once, stacked along the first axis."""
        for now in w.astype(float):
            self.draws.append(now)
            self.r_hat.append(self.after(now))
        self.acceptance += acceptance.mean(1).tolist()
        self.step_size += size.tolist()

    def after(self, w: np.ndarray) -> float:
        """The worst R-hat of the coefficients, by Welford's sums."""
        if len(self.draws) == WARMUP + 1:
            self.count, self.mean, self.squares = 0, 0 * w, 0 * w
        self.count += 1
        off = w - self.mean
        self.mean = self.mean + off / self.count
        self.squares = self.squares + off * (w - self.mean)
        if self.count < 10:
            return float("nan")
        within = self.squares.mean(0) / (self.count - 1)
        between = self.mean.var(0, ddof=1)
        share = (self.count - 1) / self.count
        return float(np.sqrt(share + between / within).max())

    def draw(self, step: np.ndarray) -> None:
        if not self.draws:
            return  # a batch of the other tap may come after this one
        figure = Figure(figsize=(7, 5), dpi=70, layout="constrained")
        canvas = FigureCanvasAgg(figure)
        self.draw_on(figure)
        figure.suptitle(f"step {step} of {STEPS}")
        canvas.draw()
        self.frames.append(np.asarray(canvas.buffer_rgba())[..., :3].copy())

    def draw_on(self, figure: Figure) -> None:
        axes = figure.subplots(2, 2, sharex=True).ravel()
        axes[0].plot(self.acceptance, ".", markersize=2)
        axes[0].set(ylabel="acceptance", ylim=(0, 1), xlim=(0, STEPS))
        axes[1].semilogy(self.step_size, color="tab:orange")
        axes[1].set(ylabel="step size")
        axes[2].semilogy(self.r_hat, color="tab:green")
        axes[2].axhline(1.01, color="0.7", linestyle="--")
        axes[2].set(ylabel="worst R-hat", xlabel="step")
        married = np.array(self.draws)[:, :, NAMES.index("yrs_married")]
        axes[3].plot(married, linewidth=0.7)
        axes[3].set(ylabel="yrs_married, 4 chains", xlabel="step")
        for axis in axes:
            axis.axvline(WARMUP, color="0.8", zorder=0)


# %%
# The program
# -----------
#
# Warm-up and sampling are one scan. In the warm-up, dual averaging sets the step size
# from the acceptance of all chains. Nothing is stacked: the draws leave through the
# first tap, which calls the host once for up to 256 steps. The second tap has
# ``every=0.5``, in seconds, and ``always=`` for the last step.

monitor = Monitor()
kernel = blackjax.nuts.build_kernel()
start_averaging, average, averaged = dual_averaging_adaptation(target=0.8)


@jax.jit
def sample(key: jax.Array) -> Any:
    def step(carry: Any, i: jax.Array) -> tuple[Any, None]:
        states, averaging = carry
        warming = i < WARMUP
        size = jnp.exp(
            jnp.where(warming, averaging.log_step_size, averaging.log_step_size_avg)
        )

        def move(key: jax.Array, state: Any) -> Any:
            mass = jnp.ones(len(NAMES))
            return kernel(key, state, log_density, size, mass)

        keys = jax.random.split(jax.random.fold_in(key, i), CHAINS)
        states, info = jax.vmap(move)(keys, states)
        adapted = average(averaging, info.acceptance_rate.mean())
        averaging = jax.tree.map(
            lambda new, old: jnp.where(warming, new, old), adapted, averaging
        )
        hc.tap(monitor.see, states.position, info.acceptance_rate, size, batch=256)
        hc.tap(monitor.draw, i, every=0.5, always=i == STEPS - 1)
        return (states, averaging), None

    first = jax.random.normal(key, (CHAINS, len(NAMES)))
    states = jax.vmap(lambda w: blackjax.nuts.init(w, log_density))(first)
    carry = states, start_averaging(0.01)
    return jax.lax.scan(step, carry, jnp.arange(STEPS))[0]


begin = time.perf_counter()
sample(jax.random.key(0))
hc.barrier()  # the program has ended, and the taps are delivered
seconds = time.perf_counter() - begin
print(f"{STEPS} steps of {CHAINS} chains in {seconds:.1f} s;", end=" ")
print(f"{len(monitor.frames)} drawings meanwhile")

# %%
# What was seen while it ran
# --------------------------

figure, axis = plt.subplots(figsize=(7, 5), dpi=70)
figure.subplots_adjust(0, 0, 1, 1)
axis.set_axis_off()
shown = axis.imshow(monitor.frames[0])
film = FuncAnimation(
    figure,
    lambda frame: shown.set_data(monitor.frames[frame]),
    frames=len(monitor.frames),
    interval=500,
)
html = film.to_jshtml()

# %%
# At the end
# ----------

figure = plt.figure(figsize=(5.5, 4.5), layout="constrained")
monitor.draw_on(figure)

# %%
# The posterior
# -------------
#
# With so many answers the posterior is close to a normal distribution around
# the estimate of maximum likelihood, as wide as its standard error.

draws = np.array(monitor.draws)[WARMUP:].reshape(-1, len(NAMES))
fit: Any = statsmodels.api.Logit(had_affair, X).fit(disp=False)
mean, deviation = draws.mean(0), draws.std(0)

figure, axis = plt.subplots(figsize=(5.5, 4))
axis.violinplot(draws[:, 1:], orientation="horizontal", showextrema=False)
at = np.arange(1, len(NAMES))
axis.errorbar(
    fit.params[1:], at, xerr=1.96 * fit.bse[1:], fmt="k.", label="statsmodels, 95 %"
)
axis.set_yticks(at, NAMES[1:])
axis.axvline(0, color="0.7", zorder=0)
axis.set(xlabel="change of the log odds for one standard deviation")
axis.legend()
figure.tight_layout()
plt.show()

for name, *row in zip(NAMES, mean, deviation, fit.params, fit.bse, strict=True):
    print("{:16} {:7.3f} +- {:.3f}   statsmodels {:7.3f} +- {:.3f}".format(name, *row))

# %%
# No step was lost, the chains agree, and so do blackjax and statsmodels.

assert len(monitor.draws) == len(monitor.step_size) == STEPS
assert html.count("data:image/png") == len(monitor.frames)
assert monitor.r_hat[-1] < 1.05
assert (np.abs(mean - fit.params) < 0.25 * fit.bse).all()
assert np.allclose(deviation, fit.bse, rtol=0.2)
