"""The request log as a tenant meets it: what is in it, and what must not be."""

from pathlib import Path

from tests.support.requestlog import logged


async def test_a_request_of_a_tenant_with_full_is_logged_with_prompt_and_answer(tmp_path: Path):
    async with logged(tmp_path) as it:
        await it.ask("hello", user="u-1", temperature=0.5)
        (entry,) = await it.written()
        print(entry)
        page = await it.page()
        print(page)
        assert page["data"] == [entry]
