"""YAML output for people."""

import yaml


class _Dumper(yaml.SafeDumper):
    """Writes no anchors: Kubernetes parsers accept them, but they are hard to read."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def to_yaml(value: object) -> str:
    """Renders YAML in the order of the mappings."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True)
