"""Prompt states kept by token prefix, so that a returning user pays for the new events alone.

A recurrent state cannot be cut backwards: it stands for exactly the tokens that went into it. So states are copied at
chosen boundaries while a prompt is prefilled, and a later prompt may go on from a boundary if every token up to
there is the same. KV pages up to a boundary are full, never written again, and shared by reference.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from onela.config import EngineConfig
from onela.engine.active import ActiveRequest
from onela.errors import ConfigError
from onela.state import PromptPool, PromptState

Key = TypeVar("Key", int, bytes)
HOST = torch.device("cpu")


@dataclass(eq=False)
class Entry:
    """One kept state.

    Attributes:
        digests: of the prefixes up to and including its own, at every boundary. num_tokens: tokens it stands for.
        state: recurrent states and convolution tails. pages: KV pages on the device, when it is there.
        contents: of the pages, when it is on the host. session_id: whose latest prompt this is.
        pinned_until: on the clock; before that it is evicted after all that are not pinned.
    """

    digests: list[bytes]
    num_tokens: int
    state: dict[str, Tensor]
    pages: list[int]
    contents: dict[str, Tensor] | None = None
    session_id: str | None = None
    pinned_until: float = 0.0

    @property
    def digest(self) -> bytes:
        return self.digests[-1]

    @property
    def host_nbytes(self) -> int:
        """Bytes on the host."""
        tensors = [*self.state.values(), *(self.contents or {}).values()]
        return sum(tensor.nbytes for tensor in tensors)


@dataclass
class CacheStats:
    """Counts since the start."""

    hits: int = 0
    host_hits: int = 0
    misses: int = 0
    hit_tokens: int = 0
    prompt_tokens: int = 0
    evictions: int = 0
    dropped: int = 0


class PromptCache:
    """Least recently used states leave the device for the host, and the host for good.

    Args:
        config: budgets and boundaries.
        prompts: the pool whose states and pages are kept.
        clock: seconds.
    Raises:
        ConfigError: the interval is no multiple of the page size.
    """

    def __init__(
        self, config: EngineConfig, prompts: PromptPool, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.interval = config.prompt_cache_interval
        if prompts.has_pages and self.interval % prompts.page_size:
            raise ConfigError(
                f"prompt_cache_interval: {self.interval} is no multiple of page_size = {prompts.page_size}"
            )
        self.tail = max(1, config.prompt_cache_tail)  # one token must be run to have something to choose from
        self.pin_s = config.prompt_cache_pin_s
        self.device_bytes = config.prompt_cache_bytes
        self.host_bytes = config.prompt_cache_host_bytes
        self.prompts = prompts
        self.clock = clock
        self.stats = CacheStats()
        self._device: OrderedDict[bytes, Entry] = OrderedDict()
        self._host: OrderedDict[bytes, Entry] = OrderedDict()
        self._host_nbytes = 0
        self._pages: Counter[int] = Counter()
        self._prefixes: Counter[bytes] = Counter()
        self._sessions: dict[str, Entry] = {}

    @property
    def num_entries(self) -> tuple[int, int]:
        """States on the device and on the host."""
        return len(self._device), len(self._host)

    @property
    def num_pages(self) -> int:
        """Pages of the pool that the cache is a user of."""
        return len(self._pages)

    @property
    def nbytes(self) -> tuple[int, int]:
        """Bytes on the device (a page that two entries share counts once) and on the host."""
        states = len(self._device) * self.prompts.snapshot_nbytes
        return states + len(self._pages) * self.prompts.page_nbytes, self._host_nbytes

    def prepare(self, request: ActiveRequest) -> None:
        """Work out the digests of a prompt's prefixes. May be called from any thread."""
        tokens = request.prompt_token_ids
        digest, digests = b"", []
        for end in range(self.interval, len(tokens), self.interval):
            block = tokens[end - self.interval : end].tobytes()
            digest = hashlib.blake2b(digest + block, digest_size=16).digest()
            digests.append(digest)
        request.prefix_digests = digests

    def allocate(self, request: ActiveRequest) -> PromptState | None:
        """A place for a prompt, with the state of its longest kept prefix in it; None when there is no room now."""
        num_tokens = len(request.prompt_token_ids)
        entry = self._find(request)
        shared = [] if entry is None else entry.pages
        if not self._make_room(num_tokens, entry, shared):
            return None
        prompt = self.prompts.allocate(num_tokens, shared)
        self.stats.prompt_tokens += num_tokens
        try:
            if entry is None or not self._use(entry, prompt, request):
                self.stats.misses += 1
        except BaseException:
            self.prompts.free(prompt)
            raise
        request.stops = self._boundaries(request, prompt.num_tokens)
        return prompt

    def known_tokens(self, request: ActiveRequest) -> int:
        """Tokens of the longest kept prefix of a prompt."""
        entry = self._find(request)
        return 0 if entry is None else entry.num_tokens

    def store(self, request: ActiveRequest) -> None:
        """Keep the state of a prompt that stands at one of its stops, if there is memory for a copy of it."""
        prompt = request.prompt
        assert prompt is not None
        count = prompt.num_tokens // self.interval
        digests = request.prefix_digests[:count]
        if digests[-1] in self._device or digests[-1] in self._host:
            return
        num_pages = prompt.num_tokens // self.prompts.page_size if self.prompts.has_pages else 0
        if self.prompts.snapshot_nbytes + num_pages * self.prompts.page_nbytes > self.device_bytes:
            return
        pages = prompt.pages[:num_pages]
        try:
            state = self.prompts.snapshot(prompt)
        except Exception as error:
            if _is_out_of_memory(error):
                return  # the prompt goes on as well without being kept
            raise
        entry = Entry(digests, prompt.num_tokens, state, pages)
        self.prompts.pages.share(pages)
        self._pages.update(pages)
        self._prefixes.update(digests)
        self._device[entry.digest] = entry
        self._pin(entry, request.request.session_id)
        request.kept.append(entry.digest)
        self._trim(keep=entry)

    def discard(self, request: ActiveRequest) -> None:
        """Forget what a request has stored: it went wrong, and nobody shall go on from there."""
        for digest in request.kept:
            entry = self._device.get(digest)
            if entry is not None:
                self._leave_device(entry)
                self._drop(entry)
            entry = self._host.get(digest)
            if entry is not None:
                self._leave_host(entry)
                self._drop(entry)
        request.kept.clear()

    def clear(self) -> None:
        """Forget everything."""
        for entry in list(self._device.values()):
            self._leave_device(entry)
            self._drop(entry)
        for entry in list(self._host.values()):
            self._leave_host(entry)
            self._drop(entry)

    # ---- a prompt that arrives

    def _find(self, request: ActiveRequest) -> Entry | None:
        for digest in reversed(request.prefix_digests):
            entry = self._device.get(digest) or self._host.get(digest)
            if entry is not None:
                return entry
        return None

    def _make_room(self, num_tokens: int, hit: Entry | None, shared: list[int]) -> bool:
        """Evict until the prompt fits; nothing is evicted when that would not be enough."""
        pool = self.prompts
        if pool.fits(num_tokens, len(shared)):
            return True
        if not pool.places.fits(1):
            return False
        if not self._has_evictable(pool.pages_needed(num_tokens) - len(shared), hit, set(shared)):
            return False
        while not pool.fits(num_tokens, len(shared)):
            self._evict(keep=hit)
        return True

    def _has_evictable(self, needed: int, hit: Entry | None, kept: set[int]) -> bool:
        """Whether so many pages would come free with the entries on the device; not counting `hit` and `kept` pages."""
        users = self.prompts.pages
        left: Counter[int] = Counter()
        freed = 0
        for entry in self._device.values():
            if entry is hit:
                continue
            for page in entry.pages:
                # A page comes free with the cache's last entry on it, unless a running request is on it too.
                left[page] += 1
                freed += left[page] == self._pages[page] == users.num_users(page) and page not in kept
            if users.fits(needed - freed):
                return True
        return users.fits(needed - freed)

    def _use(self, entry: Entry, prompt: PromptState, request: ActiveRequest) -> bool:
        """Let a prompt go on from an entry, brought to the device if it is not there; False where it cannot be."""
        if entry.contents is not None and not self._bring_back(entry, prompt):
            return False
        self.stats.hits += 1
        self.stats.hit_tokens += entry.num_tokens
        self._device.move_to_end(entry.digest)
        self.prompts.restore(prompt, entry.state, entry.num_tokens)
        request.cached_tokens = entry.num_tokens
        self._pin(entry, request.request.session_id)
        self._trim(keep=entry)
        return True

    def _bring_back(self, entry: Entry, prompt: PromptState) -> bool:
        """Move an entry from the host into a prompt's pages; where the device has no memory for it, it is dropped."""
        assert entry.contents is not None
        count = entry.num_tokens // self.prompts.page_size if self.prompts.has_pages else 0
        pages = prompt.pages[:count]
        try:
            state = {name: tensor.to(self.prompts.device) for name, tensor in entry.state.items()}
            self.prompts.write_pages(pages, entry.contents)
        except Exception as error:
            if not _is_out_of_memory(error):
                raise
            self._leave_host(entry)
            self._drop(entry)
            return False
        # From here on nothing needs memory, and nothing can fail half-way.
        self._leave_host(entry)
        self.prompts.pages.share(pages)
        self._pages.update(pages)
        entry.state, entry.pages, entry.contents = state, pages, None
        self._device[entry.digest] = entry
        self.stats.host_hits += 1
        return True

    def _boundaries(self, request: ActiveRequest, start: int) -> tuple[int, ...]:
        """Where to keep this prompt's state: near its end, and where it leaves another prompt's way.

        What two prompts have in common a third is likely to have too; nothing else says where a template ends.
        """
        last = max(0, len(request.prompt_token_ids) - self.tail) // self.interval
        common = sum(digest in self._prefixes for digest in request.prefix_digests)
        wanted = {min(last, len(request.prefix_digests)), common}
        return tuple(
            sorted(
                count * self.interval
                for count in wanted
                if count * self.interval > start and not self._holds(request.prefix_digests[count - 1])
            )
        )

    def _holds(self, digest: bytes) -> bool:
        return digest in self._device or digest in self._host

    # ---- entries that come and go

    def _pin(self, entry: Entry, session_id: str | None) -> None:
        """Make an entry the latest of a session; the one before is the next to go."""
        if session_id is None:
            return
        before = self._sessions.get(session_id)
        if before is not None and before is not entry and before.session_id == session_id:
            before.session_id, before.pinned_until = None, 0.0
            if before.digest in self._device:
                self._device.move_to_end(before.digest, last=False)
        if entry.session_id is not None and entry.session_id != session_id:
            self._sessions.pop(entry.session_id, None)
        entry.session_id = session_id
        entry.pinned_until = self.clock() + self.pin_s
        self._sessions[session_id] = entry

    def _trim(self, keep: Entry) -> None:
        while self.nbytes[0] > self.device_bytes and len(self._device) > 1:
            self._evict(keep=keep)

    def _evict(self, keep: Entry | None) -> None:
        """Move one entry from the device to the host, or drop it where the host has no room."""
        now = self.clock()
        candidates = [entry for entry in self._device.values() if entry is not keep]
        entry = next((entry for entry in candidates if entry.pinned_until <= now), candidates[0])
        self.stats.evictions += 1
        if not self._copy_to_host(entry):
            self._leave_device(entry)
            self._drop(entry)
            return
        self._leave_device(entry)
        self._host[entry.digest] = entry
        self._host_nbytes += entry.host_nbytes
        for oldest in list(self._host.values()):
            if self._host_nbytes <= self.host_bytes:
                break
            if oldest is not keep:
                self._leave_host(oldest)
                self._drop(oldest)

    def _copy_to_host(self, entry: Entry) -> bool:
        """Copy an entry's state and pages; False, and nothing has changed, where the host has no room for them."""
        size = self.prompts.snapshot_nbytes + len(entry.pages) * self.prompts.page_nbytes
        if size > self.host_bytes:
            return False
        try:
            contents = self.prompts.read_pages(entry.pages, HOST)
            state = {name: tensor.to(HOST) for name, tensor in entry.state.items()}
        except Exception as error:
            if _is_out_of_memory(error):
                return False
            raise
        entry.contents, entry.state = contents, state
        return True

    def _leave_device(self, entry: Entry) -> None:
        del self._device[entry.digest]
        _subtract(self._pages, entry.pages)
        self.prompts.pages.free(entry.pages)
        entry.pages = []

    def _leave_host(self, entry: Entry) -> None:
        del self._host[entry.digest]
        self._host_nbytes -= entry.host_nbytes

    def _drop(self, entry: Entry) -> None:
        """Called when an entry is in neither tier any more."""
        self.stats.dropped += 1
        _subtract(self._prefixes, entry.digests)
        if entry.session_id is not None:
            self._sessions.pop(entry.session_id, None)


def _is_out_of_memory(error: Exception) -> bool:
    """Whether an allocation has failed, on the device or on the host; torch has no class of its own for the latter."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and "allocate memory" in str(error)


def _subtract(counts: Counter[Key], keys: Iterable[Key]) -> None:
    """Count each key once less, without a pass over all the others."""
    for key in keys:
        if counts[key] == 1:
            del counts[key]
        else:
            counts[key] -= 1
