"""Places in a pool: contiguous extents and single pages. Integers only; the tensors live elsewhere."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from onela.errors import CapacityError


class ExtentAllocator:
    """Hands out contiguous ranges `[start, start + size)`, first fit, and merges what comes back.

    Args:
        name: what the places are, for error messages.
        limit: the most places there may ever be; None for no limit.
    """

    def __init__(self, name: str, limit: int | None = None) -> None:
        self.name = name
        self.limit = limit
        self._taken: list[tuple[int, int]] = []

    @property
    def num_taken(self) -> int:
        """Places in use."""
        return sum(size for _, size in self._taken)

    @property
    def end(self) -> int:
        """One past the last place in use: the size a pool must have."""
        return max((start + size for start, size in self._taken), default=0)

    def fits(self, size: int) -> bool:
        """Whether `allocate(size)` would succeed now."""
        return self.limit is None or self._find(size) + size <= self.limit

    def allocate(self, size: int) -> int:
        """Take `size` adjoining places and return the first. Raises `CapacityError` when there is no room."""
        start = self._find(size)
        if self.limit is not None and start + size > self.limit:
            raise CapacityError(
                f"{self.name}: {size} adjoining places asked for, {self.limit - self.num_taken} of {self.limit} free"
            )
        bisect.insort(self._taken, (start, size))
        return start

    def free(self, start: int, size: int) -> None:
        """Give back a range exactly as it was taken."""
        self._taken.remove((start, size))

    def planned(self, sizes: Sequence[int], without: tuple[int, int] | None = None) -> list[int] | None:
        """Where ranges of these sizes would lie, `without` a range that is given back first; None: there is no room."""
        trial = ExtentAllocator(self.name, self.limit)
        trial._taken = [taken for taken in self._taken if taken != without]
        try:
            return [trial.allocate(size) if size else 0 for size in sizes]
        except CapacityError:
            return None

    def take(self, start: int, size: int) -> None:
        """Take a range that is free, where `planned` has put it."""
        bisect.insort(self._taken, (start, size))

    def _find(self, size: int) -> int:
        start = 0
        for taken, taken_size in self._taken:
            if taken - start >= size:
                break
            start = max(start, taken + taken_size)
        return start


class PageAllocator:
    """Hands out single pages, lowest number first, with a count of users each so that prefixes can be shared.

    Args:
        name: what the pages are, for error messages.
        limit: the most pages there may ever be; None for no limit.
    """

    def __init__(self, name: str, limit: int | None = None) -> None:
        self.name = name
        self.limit = limit
        self._users: dict[int, int] = {}
        self._free: list[int] = []
        self._end = 0

    @property
    def num_taken(self) -> int:
        """Pages in use."""
        return len(self._users)

    @property
    def end(self) -> int:
        """One past the highest page ever handed out: the size a pool must have."""
        return self._end

    def fits(self, count: int) -> bool:
        """Whether `allocate(count)` would succeed now."""
        return self.limit is None or self.num_taken + count <= self.limit

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages. Raises `CapacityError` when there are too few."""
        if not self.fits(count):
            raise CapacityError(
                f"{self.name}: {count} asked for, {(self.limit or 0) - self.num_taken} of {self.limit} free"
            )
        pages = self._free[:count]
        del self._free[:count]
        end = self._end + count - len(pages)
        pages += range(self._end, end)
        self._end = end
        self._users.update(dict.fromkeys(pages, 1))
        return pages

    def share(self, pages: list[int]) -> None:
        """Count one more user of each page."""
        for page in pages:
            self._users[page] += 1

    def num_users(self, page: int) -> int:
        """How many users a page has."""
        return self._users.get(page, 0)

    def free(self, pages: list[int]) -> None:
        """Count one user less of each page; a page without users can be handed out again."""
        users = self._users
        for page in pages:
            if users[page] > 1:
                users[page] -= 1
            else:
                del users[page]
                self._free.append(page)
        self._free.sort()  # runs in order, which take next to no time
