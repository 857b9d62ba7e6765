"""What a Model says of KEDA, and who writes its replicas while that changes."""

from dataclasses import replace

import pytest

from shoal.api import names, reasons
from shoal.api.model import Driver
from shoal.core.keda import Autoscaler, ScaledObject, ScaledVariant, Seen, has_taken_over, judge, writer
from shoal.core.keda.verdict import KEDA_FINALIZER, silence_timeout
from shoal.kube.kedaviews import autoscaler, scaled_object, slim_autoscaler

SCALED = ScaledObject(
    namespace="chat", name="llama-l4", uid="so", gpu_class="l4", deleting=False, minimum=1, maximum=10, ready=True,
    message="", paused_by=None, was_active=True, finalizers=(KEDA_FINALIZER,),
)  # fmt: skip
HPA = Autoscaler(
    namespace="chat", name="keda-hpa-llama-l4", uid="h", target="llama-l4", scaled_object="so", exact=True,
    active=True, disabled=False, message="",
)  # fmt: skip
GOOD = ScaledVariant("llama-l4", "KEDA", SCALED, HPA, silent=False)


def said(
    *variants: ScaledVariant, driver: Driver = "KEDA", installed: bool | None = True, problem: str | None = None
) -> str:
    """status reason: message."""
    found = judge(Seen(driver, "chat", installed, "shoal-scaler.shoal.svc:9666", variants, problem))
    return "" if found is None else f"{found.status} {found.reason}: {found.message}"


def test_all_is_well() -> None:
    assert said(GOOD) == f"True {reasons.DRIVEN_BY_KEDA}: KEDA and its HPA carry out what is decided"


@pytest.mark.parametrize(
    ("variant", "expected"),
    [
        (
            replace(GOOD, silent=True),
            "False KEDANotPolling: KEDA does not ask about ScaledObject llama-l4; replicas stay. Look whether its "
            "operator runs and reaches shoal-scaler.shoal.svc:9666 (NetworkPolicy, certificate); if it hangs, "
            "restart it",
        ),
        (
            replace(GOOD, silent=True, scaled=replace(SCALED, ready=False, message="x509: unknown authority")),
            "False KEDANotPolling: KEDA does not ask about ScaledObject llama-l4; replicas stay. It says: x509: "
            "unknown authority. Look",
        ),
        (
            replace(GOOD, scaled=replace(SCALED, paused_by="autoscaling.keda.sh/paused-scale-in"), silent=True),
            "False ScaledObjectPaused: ScaledObject llama-l4 is paused by its annotation "
            "autoscaling.keda.sh/paused-scale-in: kubectl annotate scaledobject llama-l4 -n chat "
            "autoscaling.keda.sh/paused-scale-in- lets KEDA go on",
        ),
        (
            replace(GOOD, other_hpas=("mine",)),
            "False OtherAutoscaler: HorizontalPodAutoscaler mine scales Deployment llama-l4 too, and undoes what is "
            "decided: delete it",
        ),
        (
            replace(GOOD, scaled=replace(SCALED, ready=False, message="Triggers are not working correctly")),
            "False ScaledObjectRefused: KEDA does not carry out ScaledObject llama-l4: Triggers are not working",
        ),
        (
            replace(GOOD, hpa=replace(HPA, active=False, message="unable to get external metric")),
            "False MetricsUnavailable: HorizontalPodAutoscaler keda-hpa-llama-l4 gets no metric, so replicas stay: "
            "look at KEDA's metrics adapter and kubectl get apiservice v1beta1.external.metrics.k8s.io. It says: "
            "unable to",
        ),
        (replace(GOOD, hpa=replace(HPA, active=False, disabled=True)), "True DrivenByKEDA"),
        (
            ScaledVariant("llama-l4", "Shoal"),
            "Unknown SwitchingDriver: waits for ScaledObject llama-l4 and its HPA; Shoal writes replicas until then",
        ),
        (
            replace(GOOD, writer="Shoal", silent=None),
            "Unknown SwitchingDriver: waits for KEDA's first question; Shoal writes replicas until then",
        ),
        (
            ScaledVariant("llama-l4", "KEDA"),
            "Unknown SwitchingDriver: waits for ScaledObject llama-l4 and its HPA; replicas stay until then",
        ),
        (
            ScaledVariant("llama-l4", "KEDA", refused="admission webhook denied the request"),
            "False ScaledObjectRefused: the API server refuses ScaledObject llama-l4: admission webhook denied",
        ),
    ],
)
def test_each_fault_says_what_to_do(variant: ScaledVariant, expected: str) -> None:
    assert said(replace(GOOD, deployment="llama-h100"), variant).startswith(expected)


def test_a_cluster_without_keda() -> None:
    assert said(GOOD, installed=False) == (
        "False KEDANotInstalled: the API server knows no ScaledObjects, so nobody changes replicas: install KEDA (2.18 "
        "or later), or set spec.scaling.driver to BuiltIn"
    )
    assert said(installed=None) == "", "nothing to scale yet"


def test_an_operator_that_cannot_answer_says_why() -> None:
    assert said(GOOD, problem="Secret shoal-scaler-tls is not mounted") == (
        "False KEDANotPolling: the operator cannot answer KEDA: Secret shoal-scaler-tls is not mounted"
    )


def test_back_to_builtin() -> None:
    assert said(ScaledVariant("llama-l4", "Shoal"), driver="BuiltIn") == ""
    going = replace(GOOD, scaled=replace(SCALED, deleting=True))
    assert said(going, driver="BuiltIn") == (
        "Unknown SwitchingDriver: back to BuiltIn: Shoal writes replicas again once ScaledObject llama-l4 and its HPA "
        "are gone"
    )
    stuck = said(replace(going, silent=True), driver="BuiltIn")
    assert 'kubectl patch scaledobject llama-l4 -n chat --type merge -p \'{"metadata":{"finalizers":null}}\'' in stuck


@pytest.mark.parametrize(("polling", "minimum", "expected"), [(1, 0, 15.0), (5, 0, 15.0), (30, 0, 90.0), (5, 1, 45.0)])
def test_silence_is_three_missed_looks(polling: int, minimum: int, expected: float) -> None:
    """Where one replica is kept KEDA asks only when the HPA looks."""
    assert silence_timeout(polling, minimum) == expected


@pytest.mark.parametrize(
    ("driver", "scaled", "hpa", "ours", "asked", "expected"),
    [
        ("BuiltIn", None, None, True, False, "Shoal"),
        ("BuiltIn", SCALED, HPA, False, True, "KEDA"),
        ("BuiltIn", replace(SCALED, deleting=True), HPA, False, True, "KEDA"),
        ("BuiltIn", None, HPA, False, True, "KEDA"),  # the garbage collector has not come yet
        ("KEDA", None, None, False, False, "KEDA"),  # never Shoal's
        ("KEDA", None, None, True, False, "Shoal"),
        ("KEDA", replace(SCALED, ready=None, was_active=False), None, True, False, "Shoal"),
        ("KEDA", replace(SCALED, was_active=False), None, True, True, "Shoal"),
        ("KEDA", replace(SCALED, was_active=False), HPA, True, True, "KEDA"),
        ("KEDA", replace(SCALED, was_active=False), replace(HPA, active=None), True, False, "Shoal"),
        ("KEDA", replace(SCALED, ready=False), HPA, True, False, "KEDA"),  # it has been active once
        ("KEDA", replace(SCALED, paused_by="x"), None, True, False, "KEDA"),
        ("KEDA", replace(SCALED, deleting=True), HPA, True, True, "KEDA"),
        ("KEDA", None, HPA, True, True, "KEDA"),
    ],
)
def test_there_is_one_writer(
    driver: Driver, scaled: ScaledObject | None, hpa: Autoscaler | None, ours: bool, asked: bool, expected: str
) -> None:
    assert writer(driver, scaled, hpa, ours=ours, polled=asked) == expected


def test_an_hpa_of_an_earlier_scaled_object_has_not_taken_over() -> None:
    assert not has_taken_over(SCALED, replace(HPA, scaled_object="older"), polled=True)


def hpa(*, labels: dict[str, str], tolerance: str | None = "0") -> Autoscaler:
    behavior = {way: {} if tolerance is None else {"tolerance": tolerance} for way in ("scaleUp", "scaleDown")}
    raw = {
        "metadata": {
            "namespace": "chat",
            "name": "h",
            "uid": "u",
            "labels": labels,
            "ownerReferences": [{"kind": "ScaledObject", "uid": "so"}],
        },
        "spec": {"scaleTargetRef": {"kind": "Deployment", "name": "llama-l4"}, "behavior": behavior},
        "status": {"conditions": [{"type": "ScalingActive", "status": "False", "reason": "ScalingDisabled"}]},
    }
    slim = slim_autoscaler(raw)
    found = autoscaler(slim) if slim is not None else None
    assert found is not None
    return found


def test_an_hpa_of_somebody_elses_scaled_object_is_somebody_elses() -> None:
    assert hpa(labels={names.LABEL_MODEL_UID: "m"}).scaled_object == "so"
    assert hpa(labels={"app": "mine"}).scaled_object is None


@pytest.mark.parametrize(("stored", "exact"), [("0", True), ("0.0", True), ("100m", False), (None, False)])
def test_an_hpa_is_exact_where_the_api_server_kept_its_tolerance(stored: str | None, exact: bool) -> None:
    found = hpa(labels={}, tolerance=stored)
    assert (found.exact, found.active, found.disabled) == (exact, False, True)


@pytest.mark.parametrize(
    ("annotations", "paused_by"),
    [
        ({"autoscaling.keda.sh/paused": "true"}, "autoscaling.keda.sh/paused"),
        ({"autoscaling.keda.sh/paused": "false"}, None),
        ({"autoscaling.keda.sh/paused": "yes"}, "autoscaling.keda.sh/paused"),  # KEDA takes what is no boolean for true
        ({"autoscaling.keda.sh/paused-replicas": "0"}, "autoscaling.keda.sh/paused-replicas"),
        ({"autoscaling.keda.sh/paused-scale-in": "1"}, "autoscaling.keda.sh/paused-scale-in"),
        ({"autoscaling.keda.sh/force-activation": "true"}, None),
    ],
)
def test_what_pauses_a_scaled_object(annotations: dict[str, str], paused_by: str | None) -> None:
    owner = {"uid": "m", "controller": True}
    child = scaled_object(
        {
            "metadata": {
                "namespace": "chat",
                "name": "llama-l4",
                "uid": "so",
                "annotations": annotations,
                "ownerReferences": [owner],
            },
            "spec": {},
        }
    )
    assert child is not None
    assert child.scaled is not None
    assert child.scaled.paused_by == paused_by
