"""What Shoal's developers use and its users do not install: lab, engine simulator, demo, generators.

`lab/` is a real Kubernetes on one machine, `sim/` an engine without a GPU, `demo/` shows the product on either, and
`generate/` writes what is made from the code. `shoal` never imports this package: its command finds these four by the
entry points of this distribution.
"""
