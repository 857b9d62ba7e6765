"""Requests that wait at a gateway while no replica can take them: pure decisions.

`limits` says who may wait and for how long, `fair` in which order they go, `room` how many go now, `retries` how often
a request may be sent again.
"""
