"""Decides which tokens of which requests the next step computes.

Invariants:

- First come, first served; a request joins whenever there is a row for it and leaves at its last token.
- A prompt shared by requests is computed once: one that would repeat what a running request is about to compute waits
  until it can copy it.
- Every running request that only needs its next token gets it in every step; prefills share the step's token budget.
- A request that loses its row (weights changed, rows grew too long for all) goes back to the head of the queue and
  recomputes from its ids; what it drew stays.

It plans on ids and rows and knows nothing of tensors.
"""

from collections import deque
from dataclasses import dataclass

from agentjet.inference.request import Request
from agentjet.inference.row_cache import RowCache

_WORTH_WAITING_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Work:
    """A request's share of a step."""

    request: Request
    length: int
    """Ids to compute, from `num_computed` on."""

    @property
    def draws(self) -> bool:
        """Whether the request's next token is drawn at the end of the step."""
        return self.length == self.request.num_left


class Scheduler:
    """Queue of waiting requests and set of running ones."""

    def __init__(self, cache: RowCache, *, max_running: int, prefill_tokens_per_step: int) -> None:
        self.cache = cache
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._max_running = max_running
        self._prefill_tokens = prefill_tokens_per_step

    def add(self, request: Request) -> None:
        """Queues a request."""
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        """Takes a request out, finished or cancelled; what it computed stays in the cache."""
        if request in self.running:
            self.running.remove(request)
            self.cache.release(request.row)
        elif request in self.waiting:
            self.waiting.remove(request)

    def clear_cache(self) -> None:
        """Drops all keys and values: running requests recompute theirs."""
        self._send_back(list(self.running))
        self.cache.clear()

    def keep_cache(self) -> None:
        """Requests have new weights from now on; those that run keep their keys and values, and are marked."""
        weights = self.cache.newest + 1
        for request in self.waiting:
            request.weights, request.is_mixed = weights, False
        for request in self.running:
            request.is_mixed = request.is_mixed or request.num_computed > 0
        self.cache.begin(weights)

    def _send_back(self, requests: list[Request]) -> None:
        for request in reversed(requests):
            self.running.remove(request)
            self.cache.release(request.row)
            request.row, request.num_computed = -1, 0
            self.waiting.appendleft(request)

    def next_step(self) -> list[Work]:
        """Work for a step: single tokens first, then short chunks, then long ones; equal ones by their weights."""
        self._admit()
        works = [Work(request, 1) for request in self.running if request.num_left == 1]
        budget = self._prefill_tokens
        for request in self.running:
            if request.num_left > 1 and budget > 0:
                works.append(Work(request, min(request.num_left, budget)))
                budget -= works[-1].length
        return sorted(works, key=lambda work: (work.length, work.request.weights))

    def _admit(self) -> None:
        """Gives rows to waiting requests, in order, as far as they go."""
        skipped: list[Request] = []
        while self.waiting and len(self.running) < self._max_running:
            request = self.waiting.popleft()
            if not self._make_room(request):
                self.waiting.appendleft(request)
                break
            ids = request.array()
            source, matched, known = self.cache.match(ids, request.weights)
            if known - matched >= _WORTH_WAITING_TOKENS:
                skipped.append(request)
                continue
            row = self.cache.acquire(ids, source, matched, request.weights)
            if row is None:
                self.waiting.appendleft(request)
                break
            request.row, request.num_computed = row, int(self.cache.num_computed[row])
            if request.num_cached < 0:
                request.num_cached = request.num_computed
            self.running.append(request)
        self.waiting.extendleft(reversed(skipped))

    def drew(self, request: Request, token: int) -> None:
        """Appends a drawn id, with room for it in the request's row."""
        request.ids.append(token)
        if request.row >= 0 and len(request.ids) > self.cache.length:
            allowed = self.cache.rows_at(len(request.ids))
            # The latest go back: they lose the least.
            self._send_back(self.running[allowed:])
            self._grow(len(request.ids))
        if request.row >= 0:
            self.cache.append(request.row, token)

    def _make_room(self, request: Request) -> bool:
        """Grows the rows for a request that waits; False while too many others run for rows of that length."""
        if len(request.ids) <= self.cache.length:
            return True
        if len(self.running) >= self.cache.rows_at(len(request.ids)):
            return False
        self._grow(len(request.ids))
        return True

    def _grow(self, length: int) -> None:
        moved = self.cache.grow(length)
        for request in self.running:
            request.row = moved[request.row]
