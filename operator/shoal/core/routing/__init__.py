"""From a key and a name in `model` to a replica.

modelindex.py   which Model or adapter a name means for a tenant;  consent.py  what both sides agree to
resolve.py, resolveadapters.py  what the request path knows of Models, adapters and pools
choice.py, adapterchoice.py     which replica serves a request
affinity.py     which replica has the beginning of a prompt;  prefixcache.py  whose prompts may be found
servednames.py  which of its names an object has, for its status
"""
