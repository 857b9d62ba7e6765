"""Numbers in sentences."""


def count(number: int, noun: str) -> str:
    """`1 replica`, `3 replicas`, `no replica`."""
    if number == 0:
        return f"no {noun}"
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %"


def seconds(value: float) -> str:
    return f"{value:.0f} s"


def names(some: tuple[str, ...], most: int = 3) -> str:
    """The first few, and how many more."""
    shown = ", ".join(some[:most])
    return f"{shown} and {len(some) - most} more" if len(some) > most else shown
