"""Requests that wait at a gateway while no replica can take them: pure decisions.

`limits`: which requests may wait, and for how long; `fair`: in which order they go; `room`: how many go now; `retries`:
which requests may be sent again.
"""
