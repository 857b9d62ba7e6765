"""Models whose driver is KEDA: ScaledObjects, and what KEDA is answered.

answers.py   where the external scaler gets its answers
service.py   KEDA's protocol: what it is answered, and pushed
server.py    listens while this operator leads
tls.py       its certificate
endpoints.py where KEDA finds it
protocol/    the messages, generated
"""
