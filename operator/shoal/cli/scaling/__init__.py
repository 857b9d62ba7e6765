"""`shoal why`, `top` and `wake`: what the operator decided on replicas, from what, and how it is now.

reach.py    finds the operator that leads and asks it
why.py      the last decisions on one Model
top.py      all Models, live
figures.py  sums over replicas, where unknown stays unknown
wake.py     asks for a replica without a request
"""
