"""Made-up credentials of each form that Shoal recognises. Request logs and support bundles have none of them."""

from typing import Final

KEYS: Final[tuple[str, ...]] = (
    "sk-proj-abcdefghijklm0123456789",
    "sk-ant-api03-abcdefghij0123456789",
    "sk-shoal-Abcdefghijklm0123456789",
    "pk-lf-0a1b2c3d-4e5f-6071-8293",
    "sk_live_0123456789abcdefghijklmn",
    "rk_live_0123456789abcdefghijklmn",
    "AKIAIOSFODNN7EXAMPLE",
    "ASIAIOSFODNN7EXAMPLE",
    "ABIAIOSFODNN7EXAMPLE",
    "ACCAIOSFODNN7EXAMPLE",
    "ghp_0123456789abcdefghijABCDEFGHIJ012345",
    "ghs_0123456789abcdefghijABCDEFGHIJ012345",
    "github_pat_11ABCDEFG0123456789_abcdef",
    "glpat-0123456789abcdefghij",
    "gldt-0123456789abcdefghij",
    "xoxb-1234567890-abcdefghij",
    "xapp-1-A0123456789-abcdefghij",
    "hooks.slack.com/services/T0123456789/B0123456789/abcdefghijklmnopqrstuvwx",
    "hooks.slack.com/workflows/T0123456789/A0123456789/abcdefghijklmnopqrstuvwx",
    "hooks.slack.com/triggers/T0123456789/0123456789/abcdefghijklmnopqrstuvwx",
    "AIzaSyA0123456789abcdefghijklmnopqrstuv",
    "ya29.a0AfH6SMBabcdefghijklmnop",
    "ya29.c.b0Aaekm1Kabcdefghijklmnop",
    "GOCSPX-abcdefghijklmnopqrstuvwxyz01",
    "hf_abcdefghijklmnop0123456789",
    "hf_AbcdefghijklmnopqrstuvwxyzABCDEFGH",
    "npm_0123456789abcdefghijABCDEFGHIJ012345",
    "r8_0123456789abcdefghijABCDEFGHIJ01234",
    "fw_0123456789abcdefghij",
    "gsk_abcdefghijklmnopqrstuvwxyz0123456789",
    "nvapi-abcdefghijklmnopqrstuvwxyz_0123456789",
    "tvly-dev-abcdefghijklmnop0123456789",
    "pplx-abcdefghijklmnopqrstuvwxyz0123456789",
    "glsa_abcdefghijklmnopqrstuvwxyz012345_6789abcd",
    "dop_v1_0123456789abcdef0123456789abcdef",
    "dckr_pat_abcdefghijklmnopqrstuvwxyz0",
    "pypi-AgEIcHlwaS5vcmcCJGFiY2RlZmdoaWprbG1ub3A",
    "SG.abcdefghijklmnopqrstuv.ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopq",
    "hvs.CAESIabcdefghijklmnopqrstuvwxyz",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.c2lnbmF0dXJl",
    "eyJhdXRocyI6eyJodWIiOnsiYXV0aCI6ImE/Yj+jPT0iLCJ1Ijoi==",
)

SECRET: Final = "hunter2-very"
"""No key by its form."""
PLACES: Final[tuple[str, ...]] = (
    f"pwd={SECRET}",
    f"curl -u admin:{SECRET} https://hub.example.com/x",
    f"curl -sS https://hub.example.com/x --user 'admin:{SECRET}'",
    f"Ocp-Apim-Subscription-Key: {SECRET}",
    f'{{"x-functions-key": "{SECRET}"}}',
)
"""Texts with SECRET where a secret stands."""
