"""What every process that serves HTTP shares: the server, its words, and the keys by which callers are known."""
