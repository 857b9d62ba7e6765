"""What is logged of an unexpected error in a request: its type and where it was raised.

Its text is never logged: Python often puts the offending value into it, which may be a prompt, an answer or a key.
"""

import traceback
from pathlib import PurePath
from typing import Final

_FRAMES: Final = 8


def redact_error(error: BaseException) -> dict[str, object]:
    """Log fields of an error and of its cause; the innermost frame comes last."""
    kinds, places = [type(error).__name__], _places(error)
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if cause is not None:
        kinds.append(type(cause).__name__)
        places = [*_places(cause), *places]
    return {"error": " from ".join(kinds), "at": places}


def _places(error: BaseException) -> list[str]:
    frames = traceback.extract_tb(error.__traceback__)[-_FRAMES:]
    return [f"{'/'.join(PurePath(frame.filename).parts[-2:])}:{frame.lineno} {frame.name}" for frame in frames]
