"""OpenAI's Responses API on an engine that speaks chat completions, without a store.

request.py  the body of a response -> the body of a chat completion
items.py    a chat completion -> a response, and the items of its output
stream.py   chunks of a chat completion -> the events of a response

Nothing is stored: each request brings its whole conversation (`previous_response_id` is refused).
"""

from shoal.core.responses.items import whole
from shoal.core.responses.request import NAMES, chat_request, kept_tools
from shoal.core.responses.stream import ResponseEvents

__all__ = ["NAMES", "ResponseEvents", "chat_request", "kept_tools", "whole"]
