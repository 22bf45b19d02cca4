"""May this key call, and which models: the curriculum's word, cached for a short while.

The cache only saves a question: inference checks every call's key and attempt itself. So while the curriculum is away
(it is being started again), what it said before still counts, and who was not asked about yet waits.
"""

import asyncio
import time
from collections import OrderedDict

from agentjet.accounting.key import check_belongs, peek
from agentjet.bus.protocol import Bus
from agentjet.bus.record import ask
from agentjet.errors import BusError, ForeignKeyError, KeyRejectedError
from agentjet.gateway.fault import ApiError
from agentjet.schemas.claim import Authorization, AuthorizeRequest
from agentjet.schemas.ids import RunId
from agentjet.schemas.subject import authorize_service

CACHE_SECONDS = 15.0
PATIENCE_SECONDS = 30.0
"""How long a curriculum that is away is waited for."""
_ANSWER_SECONDS = 3.0
_AGAIN_SECONDS = 0.2
_MAX_CACHED = 8192


class Access:
    """Key checks of one run."""

    def __init__(self, bus: Bus, run: RunId) -> None:
        self._bus = bus
        self._run = run
        self._cache: OrderedDict[str, tuple[Authorization, float]] = OrderedDict()

    async def check(self, key: str) -> Authorization:
        """What a key may do.

        Raises ApiError: 401 when it is forged or expired, 403 when it is for another run or role, 409 when a newer
        attempt has its ticket, 503 when nobody can tell.
        """
        cached = self._cache.get(key)
        if cached is not None and time.monotonic() < cached[1]:
            return cached[0]
        self._check_form(key)
        answer = await self._ask(key, known=cached[0] if cached else None)
        if not answer.granted and answer.reason == "superseded":
            raise ApiError(409, "superseded", "a newer attempt plays this key's ticket; stop this episode")
        if not answer.granted:
            raise ApiError(401, "invalid_api_key", f"the key is refused: {answer.reason}")
        self._cache[key] = (answer, time.monotonic() + CACHE_SECONDS)
        while len(self._cache) > _MAX_CACHED:
            self._cache.popitem(last=False)
        return answer

    async def _ask(self, key: str, *, known: Authorization | None) -> Authorization:
        """The curriculum's answer; while there is none, what is known."""
        give_up = time.monotonic() + PATIENCE_SECONDS
        question, to = AuthorizeRequest(key=key), authorize_service(self._run)
        while True:
            try:
                answer = await ask(self._bus, to, question, Authorization, timeout_seconds=_ANSWER_SECONDS)
                if answer.granted or answer.reason != "busy":
                    return answer
                problem = "the curriculum waits for the bus"
            except BusError as error:
                problem = str(error)
            if known is not None:
                return known
            if time.monotonic() > give_up:
                raise ApiError(503, "unavailable", f"the key can not be checked now: {problem}; try again")
            await asyncio.sleep(_AGAIN_SECONDS)

    def forget(self, key: str) -> None:
        """Ask again next time."""
        self._cache.pop(key, None)

    def _check_form(self, key: str) -> None:
        if not key:
            raise ApiError(
                401, "invalid_api_key", "there is no key; send `Authorization: Bearer <key>` or `x-api-key: <key>`"
            )
        try:
            check_belongs(peek(key), run=self._run)
        except ForeignKeyError as error:
            raise ApiError(403, "foreign_key", str(error)) from None
        except KeyRejectedError as error:
            raise ApiError(401, "invalid_api_key", str(error)) from None
