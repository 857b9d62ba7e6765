"""A new key: the only place that makes one."""

import secrets
import string
from typing import Final

PREFIX: Final = "sk-shoal-"
"""By which people and secret scanners know what it is."""
_ALPHABET: Final = string.ascii_letters + string.digits
_LENGTH: Final = 43
"""62^43 > 2^256. Letters and digits only: a double click takes all of it, and no shell or URL changes it."""
SHORTEST: Final = 32
"""Of a key that was made elsewhere: a shorter one might be guessed from its hash."""


def mint() -> str:
    """256 bits from the operating system."""
    return PREFIX + "".join(secrets.choice(_ALPHABET) for _ in range(_LENGTH))
