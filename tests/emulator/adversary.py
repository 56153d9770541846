"""Who runs next: seeded choices with one of several temperaments."""

from __future__ import annotations

import random


class Adversary:
    """Seeded choices. ``temperament`` is drawn from the seed unless given."""

    TEMPERAMENTS = ("random", "eager", "lazy", "starve", "bursts", "orderly")

    def __init__(self, seed: int, temperament: str | None = None):
        self.seed = seed
        self.random = random.Random(seed)
        drawn = self.random.choice(self.TEMPERAMENTS) if seed else "orderly"
        self.temperament = temperament or drawn
        self.starved: int | None = None
        if self.temperament == "starve":
            self.starved = self.random.randrange(64)

    def asynchronous_first(self, warps: int, actions: int) -> bool:
        """Whether an asynchronous action is next when both kinds of agent could run."""
        kind = self.temperament
        if kind == "eager":
            return self.random.random() < 0.9
        if kind == "lazy":
            return self.random.random() < 0.02
        if kind == "orderly":
            return self.random.random() < 0.5
        return self.random.random() < actions / (warps + actions)

    def pick(self, agents: list) -> int:
        if self.temperament == "orderly":
            return 0
        n = len(agents)
        chosen = self.random.randrange(n)
        if self.starved is not None and n > 1:
            for _ in range(3):
                if getattr(agents[chosen], "index", -1) % 64 != self.starved or self.random.random() < 0.02:
                    break
                chosen = self.random.randrange(n)
        return chosen

    def burst(self) -> int:
        """For how many yields a chosen warp keeps running."""
        if self.temperament == "bursts":
            return self.random.randrange(1, 30)
        if self.temperament == "orderly":
            return 8
        return self.random.randrange(1, 5)

    def gives_up(self) -> bool:
        """Whether a try_wait returns false at once instead of suspending."""
        return self.temperament != "orderly" and self.random.random() < 0.2
