"""How much of a streamed reply its caller has, and what is missing once the whole reply is there.

Deltas travel without a promise to arrive; the reply is stored. What a stream lacks at its end is taken from the reply,
which has to begin with what was sent: else the stream ends in an error, never in a splice. Who comes to a generation
after its beginning, as the retry of a call that still runs does, is sent nothing before its end.
"""

from typing import Any

from agentjet.gateway.fault import ApiError
from agentjet.schemas.call import InferDelta, InferReply, ToolCallDelta


class Progress:
    """Of one choice."""

    def __init__(self) -> None:
        self._generation = ""
        self._is_late = False
        """The beginning of the generation did not come."""
        self._text = self._reasoning = ""
        self._arguments: list[str] = []

    @property
    def _has_begun(self) -> bool:
        return bool(self._text or self._reasoning or self._arguments)

    def take(self, answer: InferDelta | InferReply) -> InferDelta:
        """What to send now.

        Raises ApiError (503) when the answer does not continue what was sent.
        """
        if self._has_begun and answer.generation != self._generation:
            raise _interrupted("the engine was lost in the middle of the reply")
        if answer.generation != self._generation:
            self._generation = answer.generation
            self._is_late = isinstance(answer, InferDelta) and answer.index > 0
        if self._is_late and isinstance(answer, InferDelta):
            return answer.model_copy(update={"text": "", "reasoning": "", "tool_calls": ()})
        delta = answer if isinstance(answer, InferDelta) else self._rest(answer)
        self._text += delta.text
        self._reasoning += delta.reasoning
        for piece in delta.tool_calls:
            if piece.index > len(self._arguments) or (piece.index == len(self._arguments) and not piece.name):
                raise _interrupted("a piece of the reply was lost on its way")
            if piece.index == len(self._arguments):
                self._arguments.append("")
            self._arguments[piece.index] += piece.arguments
        return delta

    def _rest(self, reply: InferReply) -> InferDelta:
        message = reply.message
        calls: list[dict[str, Any]] = message.get("tool_calls") or []
        if len(calls) < len(self._arguments):
            raise _is_another()
        return InferDelta(
            call=reply.call,
            generation=reply.generation,
            index=reply.usage.completion_tokens,
            text=_after(message.get("content") or "", self._text),
            reasoning=_after(message.get("reasoning_content") or "", self._reasoning),
            tool_calls=tuple(piece for index, call in enumerate(calls) if (piece := self._tool_rest(index, call))),
            usage=reply.usage,
        )

    def _tool_rest(self, index: int, call: dict[str, Any]) -> ToolCallDelta | None:
        function = call["function"]
        if index >= len(self._arguments):
            return ToolCallDelta(index=index, id=call["id"], name=function["name"], arguments=function["arguments"])
        rest = _after(function["arguments"], self._arguments[index])
        return ToolCallDelta(index=index, arguments=rest) if rest else None


def _after(whole: str, sent: str) -> str:
    if not whole.startswith(sent):
        raise _is_another()
    return whole[len(sent) :]


def _is_another() -> ApiError:
    return _interrupted("the stored reply is not the one that was streamed")


def _interrupted(why: str) -> ApiError:
    return ApiError(503, "stream_interrupted", f"{why}; ask again")
