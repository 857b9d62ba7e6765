"""How Shoal writes YAML that people read."""

import yaml


class _Dumper(yaml.SafeDumper):
    """Never writes anchors: Kubernetes' readers accept them, people do not."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def to_yaml(value: object) -> str:
    """YAML in the order of the mappings."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True)
