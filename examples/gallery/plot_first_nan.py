"""
The first NaN of a training run
===============================

A logistic regression on a survey of 6,366 people starts well, and ends with weights
that are all NaN. :func:`hostcall.watch` ends the compiled program at the first bad
value, and a recorder has the steps before it. These show which sample is to blame, and
why.

Besides hostcall it needs ``pip install matplotlib pandas pyarrow statsmodels``.
"""

# %%
# The data
# --------
#
# The survey asked married women about their marriage. The regression predicts whether
# there was an affair. The columns keep their units (years, points of a scale), and
# nobody scaled them: that is the first half of the mistake.

# sphinx_gallery_tags = ["errors", "training", "plots"]

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import statsmodels.api

import hostcall as hc

survey: Any = statsmodels.api.datasets.fair.load_pandas().data
y = jnp.asarray(survey.pop("affairs").to_numpy() > 0)
x = jnp.asarray(np.c_[survey.to_numpy(), np.ones(len(survey))], jnp.float32)
print(f"{x.shape[0]} people, {x.shape[1] - 1} columns: {', '.join(survey)}")

# %%
# The run that goes wrong
# -----------------------
#
# The *margin* of a sample is positive if the model is right about it. The second half
# of the mistake is in ``careless``: it takes the logarithm of a probability, and
# ``exp(-margin)`` overflows in float32 if the margin is below -88.7.
#
# The rate of the descent grows by 2 % a step up to a limit, as a warm-up does.

STEPS = 600
RATES = jnp.minimum(1e-5 * 1.02 ** jnp.arange(STEPS), 0.2)


def careless(margin: jax.Array) -> jax.Array:
    return -jnp.log(1 / (1 + jnp.exp(-margin)))


def careful(margin: jax.Array) -> jax.Array:
    return jax.nn.softplus(-margin)


def fit(
    loss_of: Callable[[jax.Array], jax.Array],
    x: jax.Array,
    record: Callable[..., None] = lambda **_: None,
) -> jax.Array:
    """The loss of each step."""

    def loss(weights: jax.Array) -> tuple[jax.Array, jax.Array]:
        margin = (x @ weights) * jnp.where(y, 1.0, -1.0)
        return loss_of(margin).mean(), margin

    def step(weights: jax.Array, now: Any) -> tuple[jax.Array, jax.Array]:
        i, rate = now
        (value, margin), slope = jax.value_and_grad(loss, has_aux=True)(weights)
        made = {"loss": value, "slope": slope}
        record(step=i, loss=value, rate=rate, margin=margin)
        hc.watch(made, also=(margin, rate), name="step")
        return weights - rate * slope, value

    steps = jnp.arange(len(RATES)), RATES
    run = jax.jit(lambda w: jax.lax.scan(step, w, steps)[1])
    return run(jnp.zeros(x.shape[1])).block_until_ready()


folder = tempfile.TemporaryDirectory()
recording = Path(folder.name) / "run"
with hc.Recorder(recording) as record:
    try:
        fit(careless, x, record)
        raise SystemExit("the mistake did not show")
    except hc.errors.WatchError as error:
        print(error)
        found = error

# %%
# The steps before
# ----------------
#
# The error has the watched values of the bad step, and what ``also=`` named. The
# recorder beside it has those of the steps before.

run = hc.tools.read(recording)
table = run.table().slice(0, found.step)
steps, losses, rates = (table[name].to_numpy() for name in ("step", "loss", "rate"))
margins = run.array("margin")[1][: found.step]
lowest = margins.min(1)
margin, rate = found.also

figure, (top, middle, bottom) = plt.subplots(3, sharex=True, figsize=(5.5, 6))
top.semilogy(steps, losses)
top.set_ylabel("loss")
top.set_title(f"The loss becomes {found.values['loss']} at step {found.step}")
middle.plot(np.append(steps, found.step), np.append(lowest, margin.min()))
middle.axhline(-88.7, color="tab:red", linestyle="--")
middle.text(0, -85, "below this line exp(-margin) is infinite", color="tab:red")
middle.set_ylabel("lowest margin")
bottom.semilogy(np.append(steps, found.step), np.append(rates, rate))
bottom.set(ylabel="rate", xlabel="step")
for axis in (top, middle, bottom):
    axis.axvline(found.step, color="0.7", zorder=0)
figure.tight_layout()

# %%
# The loss went up and down long before the bad step: the rate was too high for columns
# of this size. The margins of the bad step say which sample was the furthest below the
# line.

worst = int(margin.argmin())
figure, axis = plt.subplots(figsize=(5.5, 3))
axis.hist(margins[-1], bins=80, alpha=0.6, label="the step before")
axis.hist(margin, bins=80, alpha=0.6, label="the bad step")
axis.axvline(-88.7, color="tab:red", linestyle="--")
axis.annotate(
    f"sample {worst}",
    (margin[worst], 0),
    (margin[worst] + 40, 450),
    arrowprops={"arrowstyle": "->"},
)
axis.set(xlabel="margin", ylabel="samples")
axis.legend(loc="upper center")
figure.tight_layout()
print(survey.iloc[worst])

# %%
# The failure can go to somebody else: a zip file of arrays and text.

path = Path(folder.name) / "failure.zip"
found.save(path)
size = path.stat().st_size
again = hc.tools.load_failure(path)
folder.cleanup()
print(f"{size / 1e6:.1f} MB of step {again.step}")

# %%
# The remedy
# ----------
#
# A loss that does not overflow ends the NaNs. Scaled columns end the swings.

scaled = jnp.c_[(x[:, :-1] - x[:, :-1].mean(0)) / x[:, :-1].std(0), x[:, -1]]
with_softplus = fit(careful, x)
with_scaling = fit(careful, scaled)

figure, axis = plt.subplots(figsize=(5.5, 3.5))
axis.semilogy(losses, label="log of a probability: NaN at its end")
axis.semilogy(with_softplus, label="softplus", zorder=0)
axis.semilogy(with_scaling, label="softplus, scaled columns")
axis.set(xlabel="step", ylabel="loss")
axis.legend()
figure.tight_layout()
plt.show()

# %%
# The bad step overflowed as described, the file has it all, and both remedies help.

assert not np.isfinite(found.values["loss"])
assert margin[worst] < -88.7 < lowest[-1]
assert again.step == found.step == len(steps)
assert again.also[0][worst] == margin[worst]
assert np.allclose(losses[:300], with_softplus[:300], rtol=1e-4)
assert np.isfinite(with_softplus).all()
assert 0.5 < with_scaling[-1] < 0.56
