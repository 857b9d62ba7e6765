"""Routing: from an API key and the `model` field of a request to a replica.

modelindex.py   which Model or adapter a name means for a tenant;  consent.py  whether tenant and adapter agree
resolve.py, resolveadapters.py  what the request path knows of Models, adapters and pools
choice.py, adapterchoice.py     which replica serves a request
affinity.py     prefix caches: which replica has the beginning of a prompt, and who may share it
servednames.py  which of its names an object owns, for its status
"""
