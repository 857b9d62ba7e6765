"""docs/engine-differences.md has the rows that the contract suite expects of the engines."""

import os
import re

from shoal_dev.demo.steps import ROOT
from tests.support.behaviour import table

PAGE = ROOT / "docs" / "engine-differences.md"
TABLE = re.compile(r"^\| \| SGLang \| vLLM \|\n(?:\|.*\n)+", re.MULTILINE)


def test_the_page_has_the_rows_of_the_suite():
    text = PAGE.read_text()
    if os.environ.get("SHOAL_GOLDEN") == "write":
        PAGE.write_text(TABLE.sub(lambda _: table(), text))
        text = PAGE.read_text()
    found = TABLE.search(text)
    assert found is not None
    assert found.group() == table()
