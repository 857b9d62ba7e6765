"""`shoal` and `kubectl shoal`: the commands for people. Each command has a package.

main.py      the entry point; loads a command when it is called
options.py   options of several commands: which cluster, which installation
client.py    one way to reach a service of an installation
services.py  the services: operator, gateways, ledger
"""
