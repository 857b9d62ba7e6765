"""Whether an installation of Shoal is as it should be. Pure.

results.py         how checks make their results
types.py           what is read (`DoctorSnapshot`), and a check's result
checks.py          the table of checks
installation.py    processes, their versions, the leader, their addresses, the cluster's name service
kinds.py           CustomResourceDefinitions
permissions.py     what the operator may do
certificates.py    when certificates expire
clocks.py          clocks of the API server, of the reader, and of nodes
fleet.py           GPU classes, nodes, node caches, signals, KEDA
prices.py          price lists of the ledger
tenants.py         tenants that can use nothing
"""
