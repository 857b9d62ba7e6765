"""A few clients that are the `openai` SDK itself, without its retries: what real users' programs see."""

import time
from typing import TYPE_CHECKING, Any

import httpx
import openai

from tests.storm.plan import STREAMS, Answers, Ask, attack_of, attacked_field, prompt_text
from tests.storm.wire import ANSWER_SECONDS, LOST_TWICE, End

if TYPE_CHECKING:
    from tests.storm.load import Journal


class Sdk:
    """One SDK client; its own pool of connections."""

    def __init__(self, base_url: str, key: str) -> None:
        self._client = openai.AsyncOpenAI(base_url=base_url, api_key=key, max_retries=0, timeout=ANSWER_SECONDS)

    async def close(self) -> None:
        await self._client.close()

    async def one(self, ask: Ask, journal: "Journal", answers: Answers | None) -> None:
        """Asks once. A plan to leave is not followed here: the SDK reads to the end."""
        journal.sent(ask, ask.id, reused=None, port=None, sdk=True)
        end = End("lost", "nothing came")
        try:
            if ask.kind in STREAMS:
                await self._stream(ask, journal, end)
            else:
                await self._whole(ask, journal, end)
        except openai.APIStatusError as error:
            self._status(ask, error, end)
        except openai.APITimeoutError:
            end.outcome, end.why = "lost", f"no end within {ANSWER_SECONDS:.0f} s"
        except openai.APIConnectionError as error:
            end.outcome, end.why = "broken", f"{error} ({error.__cause__!r})"
        except openai.APIError as error:
            # The SDK's way to tell of an error event in a stream.
            body: Any = error.body
            wait = body.get("retry_after") if isinstance(body, dict) else None
            if end.first is not None:
                end.outcome, end.why = "failed", str(error)
            elif isinstance(wait, int) and 1 <= wait <= 60:
                end.outcome, end.why = "refused", str(error)
            elif error.code == LOST_TWICE:
                end.outcome, end.why = "failed", LOST_TWICE
            else:
                end.outcome, end.why = "lost", f"an error event before the answer: {error}"
        except httpx.HTTPError as error:
            # What breaks while a stream is read comes through as it is.
            end.outcome, end.why = "broken", f"{type(error).__name__}: {error}"
        except AttributeError as error:
            # anyio asks a new connection for its peer, and fails so if that was closed in the meantime.
            if "getpeername" not in str(error):
                raise
            end.outcome, end.why = "broken", f"closed as soon as it was open: {error}"
        journal.ended(ask, ask.id, end, answers)

    async def _whole(self, ask: Ask, journal: "Journal", end: End) -> None:
        headers = {"x-request-id": ask.id}
        if ask.kind == "chat":
            raw = await self._client.chat.completions.with_raw_response.create(
                model=ask.model,
                messages=[{"role": "user", "content": prompt_text(ask.prompt)}],
                max_tokens=ask.max_tokens,
                extra_headers=headers,
            )
            end.text = raw.parse().choices[0].message.content or ""
        else:
            raw = await self._client.completions.with_raw_response.create(
                model=ask.model,
                prompt=prompt_text(ask.prompt),
                max_tokens=ask.max_tokens,
                extra_headers=headers,
                extra_body={"ignore_eos": True, **attack_of(ask)},
            )
            end.text = raw.parse().choices[0].text
        end.gateway_id = raw.headers.get("x-shoal-request-id")
        end.first = end.head = time.time()
        journal.first(ask.id, end)
        end.outcome, end.why, end.status = "answered", "", raw.status_code

    async def _stream(self, ask: Ask, journal: "Journal", end: End) -> None:
        stream = await self._client.completions.create(
            model=ask.model,
            prompt=prompt_text(ask.prompt),
            max_tokens=ask.max_tokens,
            stream=True,
            extra_headers={"x-request-id": ask.id},
            extra_body={"ignore_eos": True},
        )
        end.head, end.status = time.time(), stream.response.status_code
        end.gateway_id = stream.response.headers.get("x-shoal-request-id")
        finished = False
        async with stream:
            async for chunk in stream:
                if end.first is None:
                    end.first = time.time()
                    journal.first(ask.id, end)
                for choice in chunk.choices:
                    end.text += choice.text
                    finished = finished or bool(choice.finish_reason)
        # The SDK ends the loop without a word when the connection is closed in good order before [DONE].
        if finished:
            end.outcome, end.why = "answered", ""
        else:
            end.outcome, end.why = "broken", "the stream ended without its end"

    def _status(self, ask: Ask, error: openai.APIStatusError, end: End) -> None:
        end.status, end.head = error.status_code, time.time()
        end.gateway_id = error.response.headers.get("x-shoal-request-id")
        wait = error.response.headers.get("retry-after", "")
        if ask.kind == "wrong" and error.status_code == 400:
            end.outcome, end.why = "answered", "the engine's own 400"
        elif ask.kind == "attack" and (error.status_code, error.param) == (400, attacked_field(ask)):
            end.outcome, end.why = "answered", "the gateway's own 400"
        elif error.status_code in (429, 503) and wait.isdigit() and 1 <= int(wait) <= 60:
            end.outcome, end.why = "refused", str(error)
        elif error.status_code == 502 and error.code == LOST_TWICE:
            end.outcome, end.why = "failed", LOST_TWICE
        else:
            end.outcome, end.why = "lost", f"{error.status_code}, Retry-After {wait or None}: {error}"
