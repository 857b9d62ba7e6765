"""What the status of each kind says, decided from what was observed.

modelstatus.py  (observed.py: what was observed;  readiness.py: Ready;  variants.py: each GPU class)
poolstatus.py, adapterstatus.py, gpuclassstatus.py, tenantstatus.py
diagnosis.py    why replicas do not serve
conditions.py   from findings to conditions, so that an unchanged finding changes nothing
"""
