"""Models whose driver is KEDA: ScaledObjects, and what KEDA is answered.

driver.py    what the parts below have in common, and what wakes a Model; children/scaledobjects.py writes ScaledObjects
observe.py   observation of KEDA: its kinds, which may be absent, and the ScaledObjects that it polls
conditions.py  messages and conditions about KEDA
targets.py   the numbers that are answered;  answers.py  as the external scaler asks for them
service.py   KEDA's protocol: what it is answered, and pushed
server.py    listens while this operator leads
tls.py       its certificate
endpoints.py where KEDA finds it
protocol/    the messages, generated
"""
