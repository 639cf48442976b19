"""Where the parts of a beam lie in its row of int32 numbers.

0, 1        its node of the trie, int64; PAD in a beam that does not live
2           the sum of its log-probabilities, fp32; -inf in a beam that does not live
3           which beam of the step before it extends; PAD
4           in the first row of a request: whether its logits could not be ranked at any step
HEAD        its codes, one per level, then as many scores (fp32, the sum after each code), then as many slots of
            its ancestors, oldest first
"""

from __future__ import annotations

NODE, SCORE, PARENT, INVALID, HEAD = 0, 2, 3, 4, 6


def row_size(num_levels: int) -> int:
    """Numbers of a row, a multiple of 4."""
    return -(-(HEAD + 3 * num_levels) // 4) * 4


def scores_at(num_levels: int) -> int:
    """The column of the first score."""
    return HEAD + num_levels


def ancestors_at(num_levels: int) -> int:
    """The column of the oldest ancestor."""
    return HEAD + 2 * num_levels
