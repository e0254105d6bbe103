"""Policies of the literature, told as lanes and keys so that they choose over the same queue as the server's own.

Owns one small class each: GDSF, SIEVE, S3-FIFO, W-TinyLFU and LHD (docs/prefix-reuse.md names the papers and says what differs).
They are played by the lab and not offered to a server. What the papers do by sweeping a list (a clock hand, a halving of
counters) is said by keys that grow instead, so nothing but a use moves a unit. Ghosts are fingerprints in fixed arrays.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from .policies import TICKS, Recency, Units, Worth


class Gdsf(Recency):
    """Greedy dual size frequency: uses times cost per block, above the inflation that the last victim left.

    Blocks are of one size and one cost here, so this is the frequency with a floor that rises.
    """

    def __init__(self, num_units: int, capacity: int) -> None:
        super().__init__(num_units, capacity)
        self._floor = 0.0
        self._uses = np.zeros(num_units, dtype=np.int64)
        self._credit = np.zeros(num_units)

    def published(self, units: Units, first_page: int, prints: Units) -> None:
        self._uses[units] = 0
        self.touched(units)

    def touched(self, units: Units) -> None:
        self._mark(units)
        self._uses[units] += 1
        self._credit[units] = self._floor + self._uses[units]

    def held(self, units: Units, reply_tokens: int = 0) -> None:
        return

    def freed(self, unit: int) -> None:
        self._floor = max(self._floor, float(self._credit[unit]))

    def key(self, unit: int) -> float:
        return float(self._credit[unit]) + float(self._last_use[unit]) / TICKS

    def newcomer(self, first_page: int) -> Worth:
        return (self._floor + 2.0,)


class Sieve(Recency):
    """A hand sweeps from the oldest to the newest; what was hit since it passed is spared once, in its place.

    A unit's key is the lap in which the hand will find it without a hit, and its age: the hand is the last victim's key.
    """

    def __init__(self, num_units: int, capacity: int) -> None:
        super().__init__(num_units, capacity)
        self._lap = np.zeros(num_units, dtype=np.int64)
        self._hand = (0, 0)

    def published(self, units: Units, first_page: int, prints: Units) -> None:
        self._mark(units)
        self._lap[units] = self._hand[0]

    def touched(self, units: Units) -> None:
        lap, age = self._hand
        self._lap[units] = lap + 1 + (self._last_use[units] <= age)

    def held(self, units: Units, reply_tokens: int = 0) -> None:
        return

    def freed(self, unit: int) -> None:
        self._hand = max(self._hand, (int(self._lap[unit]), int(self._last_use[unit])))

    def key(self, unit: int) -> float:
        return float(int(self._lap[unit]) * TICKS + int(self._last_use[unit]))


class _Ghosts:
    """Fingerprints of the last ``most`` units that left."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._left: OrderedDict[int, None] = OrderedDict()

    def add(self, fingerprint: int) -> None:
        self._left[fingerprint] = None
        if len(self._left) > self._most:
            self._left.popitem(last=False)

    def remembers(self, fingerprint: int) -> bool:
        return fingerprint in self._left


class S3Fifo(Recency):
    """A small queue for newcomers, a main one for what was hit there or is remembered; hits in the main one spare up to 3 times.

    A hit moves a unit to the main queue at once, where the paper waits until it comes to the small queue's end.
    """

    SMALL = 0.1

    def __init__(self, num_units: int, capacity: int) -> None:
        super().__init__(num_units, capacity)
        self._small_most = max(1, int(capacity * self.SMALL))
        self._small_held = 0
        self._main = np.zeros(num_units, dtype=np.bool_)
        self._turn = np.zeros(num_units, dtype=np.int64)
        self._print = np.zeros(num_units, dtype=np.uint64)
        self._hand_lap = 0
        self._ghosts = _Ghosts(capacity)

    def published(self, units: Units, first_page: int, prints: Units) -> None:
        self._mark(units)
        self._print[units] = np.asarray(prints, dtype=np.uint64)
        known = np.array([self._ghosts.remembers(int(one)) for one in prints], dtype=np.bool_)
        self._main[units] = known
        self._turn[units] = self._hand_lap
        self._small_held += len(units) - int(np.count_nonzero(known))

    def touched(self, units: Units) -> None:
        chosen = np.asarray(units, dtype=np.int64)
        fresh = chosen[~self._main[chosen]]
        self._small_held -= len(fresh)
        self._mark(fresh)
        self._main[chosen] = True
        self._turn[chosen] = np.minimum(
            np.maximum(self._turn[chosen], self._hand_lap) + 1, self._hand_lap + 3
        )

    def held(self, units: Units, reply_tokens: int = 0) -> None:
        return

    def freed(self, unit: int) -> None:
        if self._main[unit]:
            self._hand_lap = max(self._hand_lap, int(self._turn[unit]))
        else:
            self._small_held -= 1
            self._ghosts.add(int(self._print[unit]))

    def lane(self, unit: int) -> int:
        return int(self._main[unit])

    def key(self, unit: int) -> float:
        return float(int(self._turn[unit]) * TICKS + int(self._last_use[unit]))

    def worth(self, lane: int, key: float) -> Worth:
        first = 0 if self._small_held > self._small_most else 1
        return (float(lane != first), key)


class WTinyLfu(Recency):
    """A window of the newest hundredth; outside it the fewest uses in a sketch that remembers what is not cached.

    The paper halves all counters now and then; here new uses count twice as much instead.
    """

    WINDOW = 0.01
    PERIOD = 10

    def __init__(self, num_units: int, capacity: int) -> None:
        super().__init__(num_units, capacity)
        self._window = max(1, int(capacity * self.WINDOW))
        size = 1 << (max(8 * capacity, 1024) - 1).bit_length()
        self._mask = np.uint64(size - 1)
        self._sketch = np.zeros((2, size))
        self._print = np.zeros(num_units, dtype=np.uint64)
        self._rank = np.zeros(num_units, dtype=np.int64)
        self._weight, self._counted, self._period = 1.0, 0, self.PERIOD * capacity

    def published(self, units: Units, first_page: int, prints: Units) -> None:
        self._print[units] = np.asarray(prints, dtype=np.uint64)
        self.touched(units)

    def touched(self, units: Units) -> None:
        self._tick += len(units)
        self._last_use[units] = self._tick
        prints = self._print[units]
        slots = np.stack([prints & self._mask, (prints >> np.uint64(24)) & self._mask]).astype(np.int64)
        np.add.at(self._sketch[0], slots[0], self._weight)
        np.add.at(self._sketch[1], slots[1], self._weight)
        least = np.minimum(self._sketch[0, slots[0]], self._sketch[1, slots[1]])
        self._rank[units] = np.floor(2.0 * np.log2(least)).astype(np.int64) if len(units) else 0
        self._counted += len(units)
        if self._counted >= self._period:
            self._counted, self._weight = 0, self._weight * 2.0

    def held(self, units: Units, reply_tokens: int = 0) -> None:
        return

    def lane(self, unit: int) -> int:
        return int(self._rank[unit])

    def worth(self, lane: int, key: float) -> Worth:
        return (float(key > self._tick - self._window), float(lane), key)


class Lhd(Recency):
    """Least hit density: by age and by the age at the last hit, hits to come over time to be held, learnt from what happened.

    Unlike the paper, the densities are compared at the ends of each class in order of age, not over a sample.
    """

    both_ends = True
    CLASSES, BINS = 8, 64

    def __init__(self, num_units: int, capacity: int) -> None:
        super().__init__(num_units, capacity)
        self._width = max(1, capacity // 16)
        self._class = np.zeros(num_units, dtype=np.int64)
        self._hits = np.zeros((self.CLASSES, self.BINS))
        self._ends = np.zeros((self.CLASSES, self.BINS))
        self._learn_at = capacity
        self._capacity = capacity
        ages = np.arange(self.BINS, 0, -1, dtype=float)
        self._density = np.tile(1.0 / (self.BINS + 1 - ages), (self.CLASSES, 1))

    def published(self, units: Units, first_page: int, prints: Units) -> None:
        self._tick += len(units)
        self._last_use[units] = self._tick
        self._class[units] = 0
        if self._tick >= self._learn_at:
            self._learn()

    def touched(self, units: Units) -> None:
        chosen = np.asarray(units, dtype=np.int64)
        ages = self._tick - self._last_use[chosen]
        bins = np.minimum(ages // self._width, self.BINS - 1)
        np.add.at(self._hits, (self._class[chosen], bins), 1.0)
        self._class[chosen] = 1 + np.minimum(np.log2(bins + 1).astype(np.int64), self.CLASSES - 2)
        self._last_use[chosen] = self._tick

    def held(self, units: Units, reply_tokens: int = 0) -> None:
        return

    def freed(self, unit: int) -> None:
        age = self._tick - int(self._last_use[unit])
        self._ends[int(self._class[unit]), min(age // self._width, self.BINS - 1)] += 1.0

    def lane(self, unit: int) -> int:
        return int(self._class[unit])

    def worth(self, lane: int, key: float) -> Worth:
        return (float(self._density[lane, min(int(self._tick - key) // self._width, self.BINS - 1)]), key)

    def _learn(self) -> None:
        self._learn_at = self._tick + self._capacity
        events = self._hits + self._ends
        later = np.cumsum(events[:, ::-1], axis=1)[:, ::-1]
        hits = np.cumsum(self._hits[:, ::-1], axis=1)[:, ::-1]
        held = np.cumsum(later[:, ::-1], axis=1)[:, ::-1]
        prior = 1.0 / np.arange(1, self.BINS + 1)
        self._density = (hits + prior) / (held + 1.0)
        self._hits *= 0.9
        self._ends *= 0.9
