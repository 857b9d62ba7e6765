"""/v1/tokenize and /v1/detokenize: SGLang's HTTP process answers, and no scheduler hears of them."""

from typing import cast

from shoal_dev.sim import protocol as p
from shoal_dev.sim.engine import SimEngine
from shoal_dev.sim.http import Exchange
from shoal_dev.sim.openai import RefusedError, parse


class Tokenizing:
    """The routes of one engine that turn text into tokens and back."""

    def __init__(self, engine: SimEngine) -> None:
        self._model = engine.model

    async def tokenize(self, exchange: Exchange) -> None:
        request = parse(p.TokenizeRequest, exchange, await exchange.body())
        encode, special = self._model.tokenizer.encode, request.add_special_tokens
        tokens: list[int] | list[list[int]]
        count: int | list[int]
        if isinstance(request.prompt, list):
            lists = tokens = [encode(text, special=special) for text in request.prompt]
            count = [len(ids) for ids in lists]
        elif request.prompt is not None:
            tokens = encode(request.prompt, special=special)
            count = len(tokens)
        else:
            prompt, begun = self._prompt(request)
            tokens = encode(prompt) + encode(begun)
            count = len(tokens)
        await exchange.json({"tokens": tokens, "count": count, "max_model_len": self._model.longest_text})

    async def detokenize(self, exchange: Exchange) -> None:
        request = parse(p.DetokenizeRequest, exchange, await exchange.body())
        tokenizer, special = self._model.tokenizer, not request.skip_special_tokens
        given = request.tokens
        text: str | list[str]
        try:
            if given and isinstance(given[0], list):
                text = [tokenizer.decode(cast(list[int], ids), special=special) for ids in given]
            else:
                text = tokenizer.decode(cast(list[int], given), special=special)
        except OverflowError as error:
            message = f"Internal server error during detokenization: {error}"
            raise RefusedError(500, p.error_body(message, kind="InternalServerError", code=500)) from None
        await exchange.json({"text": text})

    def _prompt(self, request: p.TokenizeRequest) -> tuple[str, str]:
        """The prompt, and the beginning of the answer."""
        if not request.messages:
            raise RefusedError(400, p.error_body("Messages cannot be empty."))
        tools = [tool.model_dump(exclude_none=True) for tool in request.tools or []]
        messages, begun = [{"role": m.role, "content": m.text()} for m in request.messages], ""
        opens, continues = request.add_generation_prompt, request.continue_final_message
        if continues and opens is False:
            message = "continue_final_message needs add_generation_prompt to open the assistant turn."
            raise RefusedError(400, p.error_body(message))
        if opens is None or continues:
            messages, begun = p.without_begun(messages, continues=continues)
        try:
            return self._model.chat_prompt(messages, tools or None, opens=opens is not False), begun
        except ValueError as error:
            raise RefusedError(400, p.error_body(str(error))) from None
