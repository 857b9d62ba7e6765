"""How Shoal's processes serve HTTP and reach each other.

server.py      the bounded HTTP server;  asgi.py  its terms;  serving.py  how servers listen and stop
shell.py       the HTTP shell of all cold endpoints: routes, bounds, refusals
roles.py       who calls, by a role's key;  pages.py  probes and metrics, by a Kubernetes token
errors.py      errors in OpenAI's shape
hub.py         the serving side of a stream, and its server-sent events;  stream.py  the listening side
installkey.py  the keys by which processes know each other
tls.py         mutual TLS of one process;  pki.py, authorities.py  certificates and who signs them
trace.py       traces (traceexport.py: OpenTelemetry's SDK, loaded where they are on)
gctuning.py    Python's garbage collector
"""
