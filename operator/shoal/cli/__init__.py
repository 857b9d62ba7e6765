"""`shoal` and `kubectl shoal`: the command line. Each command is a module or a package.

main.py      entry point; imports a command when it is called
options.py   options of several commands: cluster, installation
client.py    base of the clients of an installation's services
services.py  the clients: operator, gateways, ledger
"""
