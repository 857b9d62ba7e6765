"""The node cache: fetches each model once per node, and gives every namespace only what its own credentials may read.

On disk, below one folder (`disk`):

    blobs/sha256/ab/abcd...   every file once, by content, read-only
    models/KEY.json           the blobs of a model and its source; the file's mtime is the last use
    partial/KEY/              an unfinished fetch, which a restarted cache continues
    namespaces/NS/            the namespace's view, read-only for pods: cache.sock, and models/KEY/ of hard links
    work/                     folders that are being added or removed

`index` is the content in memory, `fetcher` handles requests, `sharedfetches` downloads, `diskquota` makes space,
`server` serves the sockets, `volumes` follows the PersistentVolumes that name the namespaces, `scrub` verifies stored
files, `process` starts everything. `core/eviction` decides what to evict.
"""
