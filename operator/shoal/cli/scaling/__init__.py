"""`shoal top` and `wake`, and the part of `shoal why` about scaling: decisions with their inputs, and current load.

why.py      the last decisions about one Model
top.py      all Models, live
totals.py   sums over replicas, where unknown stays unknown
wake.py     asks for a replica without a request
"""
