"""Anthropic's Messages API on an engine that speaks OpenAI's chat completions.

request.py  the body of a message -> the body of a chat completion
answer.py   a chat completion -> a message, and errors in that API's shape
stream.py   chunks of a chat completion -> the events of a message

The engines have a Messages API of their own, but it takes neither a request id nor a cache salt: a request could not be
ended by its id, and tenants would share prefixes.
"""

from shoal.core.anthropic.answer import error, message, token_count
from shoal.core.anthropic.request import NAMES, chat_request, count_request, kept_tools
from shoal.core.anthropic.stream import MessageEvents

__all__ = ["NAMES", "MessageEvents", "chat_request", "count_request", "error", "kept_tools", "message", "token_count"]
