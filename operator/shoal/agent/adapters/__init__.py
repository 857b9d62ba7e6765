"""The adapters of this replica: their files, loading them into the engine, leases for callers.

    service.py  the event loop: one engine call at a time, answers to callers
    files.py    the folder that agent and engine share
    calls.py    calls to the engine and their results
    web.py      the HTTP API
    metrics.py  metrics

`core/lora/lifecycle/planstep.py` decides the next step.
"""
