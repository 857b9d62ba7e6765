"""What is logged of an error in a request that nobody foresaw: its kind and where it came from.

Never its text: Python puts the value at fault into it, and that may be a prompt, an answer or a key.
"""

import traceback
from pathlib import PurePath
from typing import Final

_FRAMES: Final = 8


def told(error: BaseException) -> dict[str, object]:
    """Fields for the log; the innermost place comes last. With what it was raised from, where it was."""
    kinds, places = [type(error).__name__], _places(error)
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if cause is not None:
        kinds.append(type(cause).__name__)
        places = [*_places(cause), *places]
    return {"error": " from ".join(kinds), "at": places}


def _places(error: BaseException) -> list[str]:
    frames = traceback.extract_tb(error.__traceback__)[-_FRAMES:]
    return [f"{'/'.join(PurePath(frame.filename).parts[-2:])}:{frame.lineno} {frame.name}" for frame in frames]
