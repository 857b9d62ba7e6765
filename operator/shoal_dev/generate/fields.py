"""The reference of a request's fields, from `core/fields/table.py`."""

from shoal.core.fields.media import WORDS as MEDIA
from shoal.core.fields.multipart import MOST_HEAD, MOST_PARTS, MOST_TEXT
from shoal.core.fields.recordings import WORDS as RECORDINGS
from shoal.core.fields.table import FORMS, REFUSED, TABLE
from shoal.core.fields.work import WORDS

_INTRO = """The gateway takes these fields and no others, each within its bounds; `400` names the field at fault in
`param`. One that is `null` counts as left out.

"""
_FORMS = (
    f"{', '.join(sorted(FORMS))} takes `multipart/form-data` with one file: at most {MOST_PARTS} parts, {MOST_HEAD} "
    f"bytes of headers each, and {MOST_TEXT} bytes of text each; no part within a part, and none that is encoded."
)


def fields_reference() -> str:
    """Fields by endpoint, bounds of a whole request, and what is refused."""
    text = _INTRO
    for path, fields in TABLE.items():
        text += f"## {path}\n\n| Field | | Why |\n|---|---|---|\n"
        for name, field in sorted(fields.items()):
            notes = ["needed"] if field.needed else []
            notes += [] if field.forwarded else ["not forwarded"]
            notes += ["Models that read images"] if field.media else []
            more = f" ({', '.join(notes)})" if notes else ""
            text += f"| `{name}` | {_cell(field.kind.describe)}{more} | {_cell(field.why)} |\n"
        text += "\n"
    text += "## The work of a whole request\n\n" + "".join(f"- {line}\n" for line in WORDS)
    text += "\n## Images and sound\n\nThe gateway reads their headers; it decodes nothing.\n\n"
    text += "".join(f"- {line}\n" for line in MEDIA)
    text += f"\n## Sound files\n\n{_FORMS}\n\nThe gateway walks the frames of the file; it decodes nothing.\n\n"
    text += "".join(f"- {line}\n" for line in RECORDINGS)
    text += "\n## Refused by name\n\n| Field | It |\n|---|---|\n"
    return text + "".join(f"| `{name}` | {_cell(why)} |\n" for name, why in sorted(REFUSED.items()))


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
