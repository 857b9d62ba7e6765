"""The node cache: fetches each model once per node, and gives every namespace what its own credentials may read.

On disk, below one folder (`disk`):

    blobs/sha256/ab/abcd...   every file once, by its content, read-only
    models/KEY.json           which blobs make a model, and where they came from; its time is that of its last use
    partial/KEY/              what a fetch has so far: a killed daemon goes on from here
    namespaces/NS/            what pods of a namespace see, read-only: cache.sock, and models/KEY/ of hard links
    work/                     folders on their way in or out

`index` is the memory of it, `fetcher` brings models, `server` answers on the sockets, `volumes` follows the
PersistentVolumes that say which namespaces there are, `scrub` reads everything again, `process` starts it all. What is
to be evicted is decided in `core/eviction`.
"""
