"""The process node: a kubelet whose containers are processes of this machine.

`python -m shoal_dev.lab.node --config FILE` is one node (or all status-only nodes). The rooms:

- `config`: the file the lab writes; `kubelet`: registration, lease, watch; `server`: logs and exec for the API server.
- `pod`, `container`, `probes`, `hooks`, `status`, `events`: the life cycle, as a kubelet does it.
- `volumes`, `objects`, `env`, `images`, `network`: what a container finds when it starts.
- `spawner`, `rootfs`, `linux`: PID 1 of the node, the only part that touches namespaces and mounts; `runtime` asks it.
- `statusonly`: nodes that only report; `enter`: the argv of a command inside a running container.
"""
