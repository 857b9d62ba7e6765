"""The catalogue of models: manifests of well-known models with recorded facts, and the page that shows where they fit.

`models.yaml` records what the repositories say; the facts of the manifests and the page are computed from it by the
product's own code.
"""

from shoal_dev.generate.catalogue.manifests import manifest
from shoal_dev.generate.catalogue.page import catalogue_page
from shoal_dev.generate.catalogue.recorded import MODELS, CatalogueModel

__all__ = ["MODELS", "CatalogueModel", "catalogue_files", "catalogue_page"]


def catalogue_files() -> dict[str, str]:
    """Name in the repository -> text: a manifest per model, and the page."""
    files = {f"examples/catalogue/{model.name}.yaml": manifest(model) for model in MODELS}
    return files | {"docs/reference/catalogue.md": catalogue_page(MODELS)}
