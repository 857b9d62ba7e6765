"""Which layer of the stack a problem is in, what causes it, and what to do. Pure.

layer.py      the layers, from the hardware to the client
advice.py     every reason of `api/reasons.py`: its layer and what to do
faults.py     further reasons, of what nodes, pods and the API server show
refusals.py   every code with which a gateway refuses a request: its layer and what to do
attempts.py   why an attempt at a replica failed: its layer
requests.py   from what gateways remember of a request to why it was refused
texts.py      what a message of an engine, a kubelet, the scheduler or the API server says about its cause
types.py      what is read (`WhySnapshot`), and the answer (`Explanation`)
causes.py     from one to the other; nodes.py, pods.py and objects.py find the single causes
"""
