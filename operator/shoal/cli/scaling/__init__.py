"""`shoal why`, `top` and `wake`: what the operator decided on replicas, from what, and how it is now.

why.py      the last decisions on one Model
top.py      all Models, live
totals.py   sums over replicas, where unknown stays unknown
wake.py     asks for a replica without a request
"""
