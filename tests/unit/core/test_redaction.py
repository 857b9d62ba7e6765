"""Redaction: what each rule takes out and leaves, which rules are refused, and where texts hide."""

import base64
import re
from typing import Any

import orjson
import pytest

from shoal.api.tenant import Redaction, TenantLogging
from shoal.core.redaction.content import CUT, TAIL, Content
from shoal.core.redaction.patterns import TOKEN_FORMS
from shoal.core.redaction.rules import MOST_MATCHES, RedactionRuleRefused, compile_rules, refusals
from tests.support.secretforms import KEYS, PLACES, SECRET

PROMPT_KEYS = (
    "shoal-abcdefghijklm0123456789",
    "shoal_abcdefghijklm0123456789",
    "hf-abcdefghijklm0123456789",
    "gsk-abcdefghijklm0123456789",
)
PEM = "-----BEGIN RSA PRIVATE KEY-----\nMIIEow\nabc\n-----END RSA PRIVATE KEY-----"


def builtin(name: str) -> Redaction:
    return Redaction.model_validate({"name": name.lower(), "builtin": name})


def own(pattern: str, name: str = "rule-1") -> Redaction:
    return Redaction(name=name, pattern=pattern)


def content(*rules: Redaction, most: int = 100_000) -> Content:
    return Content(compile_rules(rules), most)


@pytest.mark.parametrize(
    ("rule", "text", "becomes"),
    [
        ("Email", "write to alice.b+x@mail.example.co.uk, now", "write to [email], now"),
        ("Email", "jürgen@müller.de and a%40b.org and bob(at)b.org", "[email] and [email] and [email]"),
        ("CreditCard", "card 4111 1111 1111 1111.", "card [creditcard]."),
        ("CreditCard", "5555-5555-5555-4444/378282246310005", "[creditcard]/[creditcard]"),
        ("CreditCard", "id 12345 4111 1111 1111 1111 99", "id 12345 [creditcard] 99"),
        ("CreditCard", "4111\u20111111\u20111111\u20111111", "[creditcard]"),
        ("IPAddress", "from 10.1.2.3:8080", "from [ipaddress]:8080"),
        ("IPAddress", "at:2001:db8::1 and fe80::1%eth0, ::ffff:10.0.0.1", "at:[ipaddress] and [ipaddress]%eth0, [ip"),
        ("PhoneNumber", "call +49 (30) 901820 or 0049 30 901820", "call [phonenumber] or [phonenumber]"),
        ("PhoneNumber", "(555) 555-0100, 555.555.0100", "[phonenumber], [phonenumber]"),
        ("PhoneNumber", "030/90 18 20", "[phonenumber]"),
    ],
)
def test_what_a_builtin_rule_takes_out(rule: str, text: str, becomes: str):
    assert compile_rules((builtin(rule),)).text(text).startswith(becomes)


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        ("Email", "@home and a@b, 5 @ 3"),
        ("CreditCard", "4111 1111 1111 1112, 1234567890123, 2026-11-22 10:11:12.123456"),
        ("IPAddress", "at 12:30:45, 1.2.3, std::vector, aa:bb:cc:dd:ee:ff"),
        ("PhoneNumber", "2026-11-22, 1,234,567, 10.1.2.3, 12345678, chapter 3-4"),
    ],
)
def test_what_a_builtin_rule_leaves(rule: str, text: str):
    assert compile_rules((builtin(rule),)).text(text) == text


@pytest.mark.parametrize("secret", [*KEYS, "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOi", PEM, PEM[:40]])
def test_what_looks_like_a_key_is_always_taken_out(secret: str):
    assert compile_rules(()).text(f"<{secret}") == "<[Secret]"


def test_each_form_of_keys_has_an_example():
    for form in TOKEN_FORMS:
        assert any(re.match(form.prefix + form.rest, key) for key in [*KEYS, *PROMPT_KEYS]), form


@pytest.mark.parametrize("key", PROMPT_KEYS)
def test_what_may_be_a_name_of_an_object_is_a_key_in_a_prompt(key: str):
    assert compile_rules(()).text(f"<{key}") == "<[Secret]"


@pytest.mark.parametrize(
    ("text", "becomes"),
    [
        ("password: hunter22", "password: [Secret]"),
        ('{"api_key": "abcdef123"}', '{"api_key": "[Secret]"}'),
        (r'"{\"client_secret\": \"abcdef123\"}"', r'"{\"client_secret\": \"[Secret]\"}"'),
        ("Authorization: Bearer abcdefghijklmn", "Authorization: Bearer [Secret]"),
        ("postgres://user:p4ss@db/x", "postgres://user:[Secret]@db/x"),
        ("export TOKEN=abc123def456", "export TOKEN=[Secret]"),
        ("curl -s https://x \\\n  -u me:hunter2 -d y", "curl -s https://x \\\n  -u me:[Secret] -d y"),
    ],
)
def test_what_stands_where_a_secret_stands_is_taken_out(text: str, becomes: str):
    assert compile_rules(()).text(text) == becomes


@pytest.mark.parametrize("text", PLACES)
def test_no_secret_is_left_where_one_stands(text: str):
    assert SECRET not in compile_rules(()).text(text)


@pytest.mark.parametrize(
    "text",
    [
        "The risk-assessment-framework and sk-learn-compatible-estimators need a token: see the password reset page.",
        "Both tests pass: everything works. A subscription key: what is that for?",
        "docker run -u 1000:1000 image, then curl -u $USER:$PASS https://x, or curl https://x; sort -u a:b",
        "hf_hub_download_with_a_timeout and npm_config_registry_of_the_team, hooks.slack.com",
    ],
)
def test_ordinary_words_are_no_secrets(text: str):
    assert compile_rules(()).text(text) == text


def test_a_rule_of_ones_own_and_overlaps():
    rules = compile_rules((own("ACME-[0-9]+", "ticket"), own("(?i)project x", "project"), builtin("Email")))
    assert rules.text("ACME-12 on Project X: acme-9@x.org") == "[ticket] on [project]: [email]"
    # A rule that takes the beginning of a secret must not save its rest.
    spoiler = compile_rules((own("sk-[a-z]{4}", "prefix"),))
    assert "0123456789" not in spoiler.text("key sk-abcdefghijklm0123456789")


def test_what_no_pattern_can_make_slow_is_bounded_all_the_same():
    rules = compile_rules((own("b", "letter"),))
    text = rules.text("ab" * (MOST_MATCHES + 10))
    assert text.count("[letter]") == MOST_MATCHES + 1
    assert "b" not in text.replace("[letter]", "")


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        (own("a(b"), "its pattern is no RE2 expression (missing ))"),
        (own("(?<=a)b"), "it has no look-around and no back-references"),
        (own(r"(a)\1"), "its pattern is no RE2 expression"),
        (own("(?:(?:a{1,100}){1,100}){1,100}"), "its pattern is no RE2 expression"),
        (own("a*"), "matches the empty string, so it takes nothing out there: let it match at least one character"),
        (own(r"\b"), "matches the empty string"),
        (own("x|"), "matches the empty string"),
        (own("sk-acme-0123456789abcdef"), "its pattern holds what looks like a secret itself"),
        (own("(deadbeef0123456789cafe|other)"), "its pattern holds what looks like a secret itself"),
        (own("hunter2", "hunter2"), "that name is itself something to take out, so it would be written all the same"),
        (own("x9", "sk-abcdefgh0123456789"), "that name is itself something to take out"),
        (Redaction(name="4111111111111111", builtin="Email"), "that name is itself something to take out"),
        (own(".+"), "that name is itself something to take out"),
        (own("[A-Z]", "rule-1"), "also matches [Secret]"),
    ],
)
def test_a_rule_that_would_store_a_secret_or_does_nothing_is_refused(rule: Redaction, says: str):
    with pytest.raises(RedactionRuleRefused) as refused:
        compile_rules((rule,))
    assert says in refused.value.message
    assert (rule.name in refused.value.message) != ("rule number 1:" in refused.value.message)
    if rule.pattern is not None and rule.pattern != rule.name and len(rule.pattern) > 3:
        assert rule.pattern not in refused.value.message  # it may be the secret itself
    (sentence,) = refusals(TenantLogging(mode="Full", redact=(rule,)))
    assert sentence == refused.value.message


def test_two_rules_may_not_write_what_the_other_takes_out():
    (sentence,) = refusals(TenantLogging(redact=(own("x1+", "mail"), own("mai", "short"))))
    assert "rule 'short': its pattern also matches [mail]" in sentence
    assert refusals(TenantLogging(redact=(own("x1+", "mail"), builtin("Email")))) == ()


def test_texts_are_redacted_wherever_they_stand():
    body = {
        "messages": [
            {"role": "system", "content": "I am bob@x.org"},
            {"role": "user", "content": [{"type": "text", "text": "mail a@x.org"}]},
            {"role": "user", "name": "c@x.org", "content": "hi"},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "description": "d@x.org", "parameters": {}}}],
        "stop": ["e@x.org"],
        "response_format": {"type": "json_schema", "json_schema": {"schema": {"properties": {"f@x.org": {}}}}},
    }
    it = content(builtin("Email"))
    logged = orjson.dumps(it.request(body)).decode()
    assert "x.org" not in logged
    assert it.counts["email"] == 6
    assert '"role":"user"' in logged


@pytest.mark.parametrize("arguments", ['{"to": "a\\u0040x.org"}', '[1, "a\\u0040x.org", {"a\\u0040x.org": 2}]'])
def test_escapes_inside_a_tool_call_hide_nothing(arguments: str):
    choice = {"tool_calls": [{"id": "1", "function": {"name": "mail", "arguments": arguments}}]}
    logged = content(builtin("Email")).answer([choice])
    inner = orjson.loads(logged[0]["tool_calls"][0]["function"]["arguments"])
    assert "[email]" in orjson.dumps(inner).decode()
    assert "0040" not in orjson.dumps(logged).decode()


def test_numbers_are_texts_too():
    it = content(builtin("CreditCard"))
    assert it.value({"card": 4111111111111111, "n": 3, "p": 0.5}) == {"card": "[creditcard]", "n": 3, "p": 0.5}


def test_files_become_a_note_of_their_size():
    png = base64.b64encode(bytes(3000)).decode()
    body = {
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{png}"}},
                    {"type": "input_audio", "input_audio": {"data": png, "format": "wav"}},
                    {"type": "text", "text": f"see ![x](data:image/gif;base64,{png}) there"},
                ],
            }
        ]
    }
    logged = content().request(body)
    parts = logged["messages"][0]["content"]
    assert parts[0]["image_url"]["url"] == "[image/png, 3000 bytes, not logged]"
    assert parts[1]["input_audio"] == {"data": "[file, 3000 bytes, not logged]", "format": "wav"}
    assert parts[2]["text"] == "see ![x]([image/gif, 3000 bytes, not logged]) there"


def test_what_says_the_same_in_other_words_is_left_out():
    body = {
        "prompt": [[1, 2], [3]],
        "logit_bias": {"15": 1},
        "stop_token_ids": [7],
        "user": "alice",
        "messages": None,
        "temperature": 0.2,
    }
    assert content().request(body) == {"temperature": 0.2, "prompt": "[3 token ids]"}


def test_an_entry_is_bounded_and_a_cut_leaves_no_half_of_a_match():
    it = content(builtin("Email"), most=5000)
    logged = it.request({"messages": [{"role": "user", "content": "x " * 2500 + "alice@example.org" + " y" * 9000}]})
    text = logged["messages"][0]["content"]
    assert it.cut
    assert len(text) < 5100
    assert text.endswith("[cut]")
    # The same where it was cut off before: the end may be the half of an address.
    broken = content(builtin("Email")).value({CUT: "z " * TAIL + "alice@exam"})
    assert "alice" not in broken
    assert broken.endswith("[cut]")


def test_depth_and_number_of_values_are_bounded():
    deep: Any = "x"
    for _ in range(200):
        deep = [deep]
    it = content()
    it.value(deep)
    assert it.cut
    wide = content(most=10_000_000)
    assert len(wide.value(["x"] * 100_000)) <= 20_000
    assert wide.cut
