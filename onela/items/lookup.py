"""Places in long ascending arrays, found in a few reads each.

A binary search of ten million numbers is twenty-four reads that wait for one another, most of them from main memory.
These tables, of two bytes or less per number, say where to look instead. What is asked of them is a thousand numbers or
so, where `take` is twice as fast as brackets.
"""

from __future__ import annotations

import numpy as np

_KEYS_PER_BUCKET = 2
_ONES = np.array([number.bit_count() for number in range(256)])
_UP_TO = (2 << np.arange(8)) - 1


class SortedKeys:
    """Finds numbers among many ascending ones, by a bucket of equally wide ranges and what it holds.

    As fast as its fullest bucket allows: ids that count up and hashes fill them evenly, ids in few dense clusters make
    it a binary search of a cluster.

    Args:
        keys: [n] int64 or uint64, ascending, repeats allowed; not empty.
    """

    def __init__(self, keys: np.ndarray) -> None:
        self.keys = keys
        self._lowest = np.uint64(int(keys[0]) % 2**64)
        span = int(keys[-1]) - int(keys[0])
        buckets = max(1, len(keys) // _KEYS_PER_BUCKET)
        shift = 0
        while span >> shift >= buckets:
            shift += 1
        self._shift = np.uint64(shift)
        # Differences of 64-bit numbers are right as unsigned ones, whatever their sign.
        firsts = (np.arange((span >> shift) + 1, dtype=np.uint64) << self._shift) + self._lowest
        index_dtype = np.int32 if len(keys) < 2**31 else np.int64
        self._starts = np.searchsorted(keys, firsts.view(keys.dtype)).astype(index_dtype)
        fullest = int(np.diff(self._starts, append=len(keys)).max())
        self._steps = [1 << bit for bit in reversed(range(fullest.bit_length()))]

    def find(self, wanted: np.ndarray) -> np.ndarray:
        """The first place of each number, or a place of another number if it is not there; [M] to [M] int64.

        `wanted` has the dtype of the keys.
        """
        bucket = (wanted.view(np.uint64) - self._lowest) >> self._shift
        last = len(self.keys) - 1
        place = self._starts.take(np.minimum(bucket, len(self._starts) - 1).view(np.int64)).astype(np.int64)
        for step in self._steps:
            place += step * (self.keys.take(np.minimum(place + (step - 1), last)) < wanted)
        return np.minimum(place, last)


class Stretches:
    """Which of the stretches that an array is cut into a member lies in.

    A word per eight members holds a bit for each, whether a stretch begins there, and above them how many began before.

    Args:
        offsets: [n + 1] integers from 0, strictly ascending; stretch i is `offsets[i] : offsets[i + 1]`.
    """

    def __init__(self, offsets: np.ndarray) -> None:
        begins = np.zeros(int(offsets[-1]), dtype=bool)
        begins[offsets[:-1]] = True
        bits = np.packbits(begins, bitorder="little").astype(np.int64)
        ones = _ONES[bits]
        self._words = bits | (np.cumsum(ones) - ones) << 8

    def of(self, members: np.ndarray) -> np.ndarray:
        """[M] int64 to [M] int64."""
        words = self._words.take(members >> 3)
        return (words >> 8) + _ONES.take(words & _UP_TO.take(members & 7)) - 1
