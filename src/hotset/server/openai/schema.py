"""Parts that chat and completion requests and replies share, spelled as OpenAI has them."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, StrictBool

from hotset.server.answers import Usage
from hotset.server.fields import AnswerFields
from hotset.server.rows import Body, Flag, Row, having, integer
from hotset.server.shapes import AnswerDetails, OpenAIUsage, PromptDetails

Logprobs = Annotated[StrictBool | integer(0, 20) | Flag, Field(union_mode="left_to_right")]  # type: ignore[valid-type]
"""True for the logprobs of chosen tokens only, or the number of likely tokens that have them, too."""


class StreamOptions(Body):
    """Parts of a stream. include_activity: chunks report activations for each token (server/activity.py)."""

    include_usage: Flag = False
    include_activity: Flag = False
    include_obfuscation: Any = None  # padding against eavesdroppers, which hotset does not send


@having(Row("n", "How many answers.", integer(1), use="request"))
class SamplingFields(AnswerFields):
    """Fields of requests that several answers can be given to."""

    stream_options: StreamOptions | None = None

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def includes_activity(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_activity


def logprobs_of(wanted: bool | int | None, top: int | None) -> int | None:
    """Return how many logprobs of likely tokens a reply has for each token, or None.

    wanted: True for the chosen tokens' logprobs, or the number. top: the number, if it is a separate field.
    """
    if wanted is None or wanted is False:
        return top or None
    return max(0 if wanted is True else wanted, top or 0)


def usage_dict(usage: Usage) -> dict[str, Any]:
    return OpenAIUsage.written(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.total_tokens,
        prompt_tokens_details=PromptDetails.written(cached_tokens=usage.cached_tokens),
        completion_tokens_details=AnswerDetails.written(reasoning_tokens=usage.reasoning_tokens),
    )
