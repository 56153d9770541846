"""Training state, its step under jit, evaluation and sampling. No input or output here."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from model import ByteLM, ModelConfig, with_rotary_positions
from sharding import Split

WARMUP_STEPS = 20
FINAL_LEARNING_RATE = 0.05
"""Where the cosine schedule ends, as a share of its peak."""
CLIP_NORM = 1.0

State = dict[str, Any]
"""``params`` (nested dict of float32 arrays), ``opt_state`` (of optax) and ``step`` (int32 scalar): what is saved."""


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """What the optimizer needs: the length of the schedule, the peak learning rate and the weight decay."""

    steps: int
    learning_rate: float = 4e-3
    weight_decay: float = 0.05


def bits_per_byte(loss: float) -> float:
    """Turns a cross entropy in nats per byte into bits per byte."""
    return loss / math.log(2.0)


def make_optimizer(config: TrainConfig) -> optax.GradientTransformation:
    """AdamW with warm-up, cosine decay and clipping by the global norm; matrices decay, norm scales do not."""
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=config.learning_rate,
        warmup_steps=min(WARMUP_STEPS, config.steps),
        decay_steps=max(config.steps, WARMUP_STEPS + 1),
        end_value=config.learning_rate * FINAL_LEARNING_RATE,
    )
    decay = optax.adamw(
        schedule,
        b2=0.98,
        weight_decay=config.weight_decay,
        mask=lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params),
    )
    return optax.chain(optax.clip_by_global_norm(CLIP_NORM), decay)


class Trainer:
    """The functions of one run, each compiled once: ``init``, ``train_step``, ``evaluate`` and ``sample``."""

    def __init__(
        self, model: ModelConfig, train: TrainConfig, attention_fn: Callable[..., jax.Array], seed: int, split: Split
    ):
        self._model = model
        self._split = split
        self._attention_fn = with_rotary_positions(attention_fn, split.positions)
        self._seed = seed
        self._optimizer = make_optimizer(train)
        self._graph = nnx.graphdef(nnx.eval_shape(self._build))
        self.train_step = jax.jit(self._train_step, donate_argnums=0)
        """(state, tokens (B, T + 1)) -> (state, loss): one update; the old state's buffers are reused."""
        self.evaluate = jax.jit(self._loss)
        """(params, tokens (B, T + 1)) -> mean cross entropy in nats, a float32 scalar."""
        self._sample = jax.jit(self._sample_bytes, static_argnames="length")

    def _build(self) -> ByteLM:
        return ByteLM(self._model, self._attention_fn, nnx.Rngs(self._seed), self._split.place)

    def init(self) -> State:
        """A fresh state; call it under ``jax.jit`` with ``out_shardings`` to have it made where it will live."""
        params = nnx.to_pure_dict(nnx.state(self._build(), nnx.Param))
        return {"params": params, "opt_state": self._optimizer.init(params), "step": jnp.zeros((), jnp.int32)}

    def _apply(self, params: Any, tokens: jax.Array) -> jax.Array:
        """Logits of tokens that are in the split's order, in that order."""
        return nnx.merge(self._graph, nnx.State(params))(tokens)

    def _loss(self, params: Any, tokens: jax.Array) -> jax.Array:
        given, following = self._split.order(tokens[:, :-1]), self._split.order(tokens[:, 1:])
        logits = self._apply(params, given)
        return optax.softmax_cross_entropy_with_integer_labels(logits, following).mean()

    def _train_step(self, state: State, tokens: jax.Array) -> tuple[State, jax.Array]:
        loss, gradients = jax.value_and_grad(self._loss)(state["params"], tokens)
        updates, opt_state = self._optimizer.update(gradients, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt_state": opt_state, "step": state["step"] + 1}, loss

    def sample(self, params: Any, prompts: np.ndarray, length: int, temperature: float) -> np.ndarray:
        """Continues ``prompts``, uint8 (B, T), by ``length`` bytes; returns uint8 (B, length).

        The last T bytes are what the model sees, at every step. ``temperature`` divides the logits and is above 0.
        """
        key = jax.random.key(self._seed)
        return np.asarray(self._sample(params, jnp.asarray(prompts, jnp.int32), key, temperature, length=length))

    def _sample_bytes(
        self, params: Any, context: jax.Array, key: jax.Array, temperature: jax.Array, *, length: int
    ) -> jax.Array:
        def next_byte(context: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
            logits = self._split.restore(self._apply(params, self._split.order(context)))[:, -1] / temperature
            byte = jax.random.categorical(key, logits).astype(context.dtype)
            return jnp.concatenate([context[:, 1:], byte[:, None]], axis=1), byte

        _, generated = jax.lax.scan(next_byte, context, jax.random.split(key, length))
        return generated.T.astype(jnp.uint8)
