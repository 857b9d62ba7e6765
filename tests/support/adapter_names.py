"""Every way in which a name could lead a request for the adapter `chat/support` to the base model `chat/llama`."""

from typing import Any

from tests.support.adapter_agents import name_of

MEANS_IT = ("support", "chat/support")
"""Words that mean the adapter."""

MEANS_NOTHING = {
    "of the engine": name_of(),
    "of the engine, without its digest": "chat.support",
    "base:adapter": "llama:support",
    "whole base:adapter": "chat/llama:support",
    "base:name of the engine": f"chat/llama:{name_of()}",
    "base:key": "chat/llama:chat/support",
    "nothing:adapter": ":support",
    "adapter:nothing": "support:",
    "base:nothing": "chat/llama:",
    "adapter:adapter": "support:support",
    "unknown": "supports",
    "unknown in the namespace": "chat/supports",
    "wrong namespace": "team/support",
    "no namespace": "/support",
    "three parts": "chat/llama/support",
    "upper case": "SUPPORT",
    "first letter upper case": "Support",
    "upper case namespace": "Chat/support",
    "blank before": " support",
    "blank behind": "support ",
    "line feed": "support\n",
    "NUL": "support\x00",
    "zero width": "sup\u200bport",
    "soft hyphen": "sup\u00adport",
    "cyrillic o": "supp\u043ert",
    "full width": "\uff53\uff55\uff50\uff50\uff4f\uff52\uff54",
    "combining": "su\u0301pport",
    "right to left": "\u202esupport",
    "percent-encoded": "%73upport",
    "percent-encoded slash": "chat%2Fsupport",
    "plus": "support+",
    "path": "../chat/support",
    "dot": "chat/./support",
    "list in a string": '["support"]',
}
"""Words that mean nothing here, and that an engine would answer with its base model, or with what is behind a colon."""

BODIES: dict[str, dict[str, Any]] = {
    "another name": {"lora_path": "rival.secret@0123456789ab"},
    "nothing": {"lora_path": None},
    "empty": {"lora_path": ""},
    "a list": {"lora_path": [name_of(), None]},
    "an empty list": {"lora_path": []},
    "an object": {"lora_path": {"name": "x"}},
    "in another case": {"LORA_PATH": "", "loraPath": "", "lora-path": ""},
    "nested": {"chat_template_kwargs": {"lora_path": None, "model": "chat/llama"}},
    "by other fields": {"lora_id": "x", "adapter": "x", "lora_name": "", "lora_request": None},
}
"""What a client could put beside `model` in order to reach other weights."""

NOT_A_WORD = (["support"], {"name": "support"}, 7, None, "", True)
"""Values of `model` that are no word."""
