"""Nodes with a real kubelet and containerd, beside the process nodes of the same lab: what shows whether those are
right, and runs Shoal's own image.

A node lives in mount and process namespaces of its own: one kill ends it with all its containers, and where a kubelet
insists on a path of the machine (/run, /var/lib, /var/log, a few kernel settings) it sees its own. On the machine
itself nothing changes but cgroups, which `shoal lab down` removes.

| module | |
|---|---|
| `programs` | builds containerd and CNI plugins, finds runc |
| `config` | what a node is told, and the configuration files of containerd, CNI and kubelet |
| `init` | PID 1 of a node |
| `cgroups` | the parent of a lab's containers |
| `archive` | images from a folder, without a registry |
"""
