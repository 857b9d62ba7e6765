"""The status of each kind, computed from observations.

modelstatus.py  (observed.py: the observations;  readiness.py: Ready;  variants.py: each GPU class)
poolstatus.py, adapterstatus.py, gpuclassstatus.py, tenantstatus.py
diagnosis.py    why replicas do not serve
conditions.py   from findings to conditions, so that an unchanged finding causes no write
"""
