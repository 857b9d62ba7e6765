"""The parts of the Executor (`controllers/executor.py`): each writes some of a Model's children. Only the Executor has
instances of the writers, so nobody else can reach a write.

workload.py       key Secrets, PodDisruptionBudget, NetworkPolicy, Deployments
scaledobjects.py  how a Deployment comes to its replicas: `/scale`, or through KEDA; the objects of KEDA
replicas.py       `replicas` through `/scale`, and the deletion cost of pods that go first
objects.py        server-side apply of one object, compared with the store first
"""
