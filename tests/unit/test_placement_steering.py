"""What pods tell the scheduler."""

from shoal.core.placement import steering


def test_small_replicas_are_drawn_together_and_whole_blocks_are_not() -> None:
    small = steering(gpu_class="l4-24gb", model_uid="u1", gpus=1)
    assert small.near is not None
    assert small.near.labels == {"app.kubernetes.io/component": "engine", "shoal.dev/gpu-class": "l4-24gb"}
    assert steering(gpu_class="h100-80gb", model_uid="u1", gpus=8).near is None
    assert small.apart.labels["shoal.dev/model-uid"] == "u1"
