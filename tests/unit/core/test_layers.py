"""The tables of layers are complete, and the order of causes has no circles."""

import ast
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.api import reasons
from shoal.core.fields import media, patterns, schemas
from shoal.core.health import dcgm
from shoal.core.health.signals import OF_GPUS
from shoal.core.layers import faults, texts, xids
from shoal.core.layers.advice import REASONS
from shoal.core.layers.attempts import FAILURES
from shoal.core.layers.candidates import Candidate, Level
from shoal.core.layers.causes import explains
from shoal.core.layers.faults import FAULTS
from shoal.core.layers.layer import Layer
from shoal.core.layers.refusals import OF_MODELS, REFUSALS
from shoal.gateway import dispatch, quotamessages, relay

SOURCES = Path(__file__).parents[3] / "operator" / "shoal"
CONDITION_TYPES = {
    "ACCEPTED", "PLACED", "AVAILABLE", "READY", "RECONCILING", "STALLED", "LOGGING_READY", "BUDGET_READY",
    "ADAPTERS_READY", "SCALING_ACTIVE", "GPUS_HEALTHY", "NODES_AVAILABLE",
}  # fmt: skip
CODE_ARGUMENT = {"client_left": 1, "ApiError": 2, "unavailable": 1, "unauthorized": 2, "FieldProblem": 2, "wrong": 2}
"""Functions that make a refusal -> the place of its code."""


def texts_of(module: object) -> set[str]:
    return {value for name, value in vars(module).items() if name.isupper() and type(value) is str}


def test_every_reason_of_a_condition_has_a_layer_and_a_next_step() -> None:
    named = {
        value
        for name, value in vars(reasons).items()
        if name.isupper() and isinstance(value, str) and name not in CONDITION_TYPES
    }
    assert set(REASONS) == named


def test_every_other_reason_has_a_row_and_none_twice() -> None:
    named = texts_of(faults)
    assert set(FAULTS) == named
    assert not FAULTS.keys() & REASONS.keys()


@pytest.mark.parametrize("reason", [*REASONS, *FAULTS])
def test_a_next_step_is_one_sentence(reason: str) -> None:
    row = faults.advice(reason)
    assert row.do.endswith(".")
    assert row.do[0].isupper()
    assert row.state == "fine" or len(row.do) > 10
    assert len(row.do) < 140


def codes() -> Iterator[str]:
    """Codes of refusals in the source of gateways and of what they call."""
    for folder in ("gateway", "net", "requestlog", "core/fields"):
        for path in (SOURCES / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call):
                    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                    place = CODE_ARGUMENT.get(name)
                    given = node.args[place : place + 1] if place is not None else []
                    if name == "__init__" and path.name == "quotamessages.py":
                        given = node.args[2:3]
                    for constant in (c for argument in given for c in results(argument)):
                        if isinstance(constant, ast.Constant) and isinstance(constant.value, str):
                            yield constant.value
                elif isinstance(node, ast.AnnAssign) and getattr(node.target, "id", "") == "_DENIED":
                    yield from (value.elts[2].value for value in node.value.values)  # type: ignore[union-attr]


def results(node: ast.expr) -> list[ast.expr]:
    """What an expression can be: both branches of a choice."""
    return [*results(node.body), *results(node.orelse)] if isinstance(node, ast.IfExp) else [node]


def test_every_refusal_of_a_gateway_has_a_layer_and_a_next_step() -> None:
    named = (media.NOT_READ, patterns.TOO_LARGE, quotamessages.EXHAUSTED, schemas.CIRCULAR)
    found = {*codes(), *named, "forbidden", "invalid_token"}
    assert {"invalid_api_key", "expired_api_key", "rate_limit_exceeded", "hold_full", "unknown_field"} <= found
    assert set(REFUSALS) == found


def failures() -> Iterator[str]:
    """Reasons of retries in the source of gateways and engines."""
    named = vars(dispatch) | vars(relay)
    for folder in ("gateway", "engine"):
        for path in (SOURCES / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                given: list[ast.expr] = []
                if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("Retry", "NotHere", "BrokenStream"):
                    given = node.args
                elif isinstance(node, ast.FunctionDef) and node.name == "elsewhere":
                    given = [each.value for each in ast.walk(node) if isinstance(each, ast.Return) and each.value]
                for found in (each for argument in given for each in results(argument)):
                    value = found.value if isinstance(found, ast.Constant) else named.get(getattr(found, "id", ""))
                    if isinstance(value, str):
                        yield value


def test_every_failure_of_an_attempt_has_a_layer_and_words() -> None:
    found = set(failures())
    assert {"lost", "connect", "wrong_model", "endpoint", "unknown_engine"} <= found
    assert set(FAILURES) == found


def test_codes_that_name_the_models_command_lead_to_the_model() -> None:
    assert {"model_unavailable", "no_replica", "hold_expired", "hold_full", "client_left_waiting"} <= OF_MODELS
    assert not OF_MODELS & {"rate_limit_exceeded", "external_unavailable", "no_route_target", "client_left_early"}
    assert set(REFUSALS) > OF_MODELS


def test_layers_are_in_the_order_of_the_stack() -> None:
    assert [layer.value for layer in Layer] == ["L0", "L0.5", "L1", "L2", "L2.5", "L3", "L4", "L5", "L6", "control"]
    assert [layer.order for layer in Layer] == list(range(10))
    assert all(layer.noun and layer.about for layer in Layer)
    assert (Layer.ENGINE.label, Layer.CONTROL.label) == ("L4 engine", "control")


def test_no_cause_explains_itself_over_others() -> None:
    """Whatever holds at the same time, following explanations upwards ends."""
    chance = random.Random(7)  # noqa: S311
    every = [*REASONS, *FAULTS]
    for _ in range(300):
        found = [
            Candidate(
                reason,
                "",
                chance.choice(list(Level)),
                (),
                frozenset(chance.sample(["a", "b", "c"], chance.randrange(4))),
                aside=chance.random() < 0.1,
                everywhere=chance.random() < 0.1,
            )
            for reason in chance.sample(every, 25)
        ]
        above = {id(c): [a for a in found if a is not c and explains(a, c)] for c in found}
        for start in found:
            seen, todo = set[int](), [start]
            while todo:
                for each in above[id(todo.pop())]:
                    assert each is not start
                    if id(each) not in seen:
                        seen.add(id(each))
                        todo.append(each)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.", faults.GPU_LOST),
        ("NVRM: Xid (PCI:0000:3b:00): 31, MMU Fault\nNVRM: Xid (PCI:0000:3b:00): 48, DBE", faults.GPU_ECC_ERROR),
        ("Xid: 119 GSP", faults.DRIVER_FAULT),
        ("XID 9999999", None),
        ("the taxid 48 of a company", None),
        # NVIDIA's catalogue: reset the GPU (64, 95), restart the application (94), ignore (63, 92)
        ("NVRM: Xid (PCI:0000:10:1c): 63, pid=1896, Row Remapper: New row marked for remapping, reset gpu to activate.",
         faults.GPU_MEMORY_REPAIRED),
        ("NVRM: Xid (PCI:0000:65:00): 64, pid='N/A', Row Remapper: Failed to remap row", faults.GPU_ECC_ERROR),
        ("NVRM: Xid (PCI:0000:01:00): 92, high single-bit ECC error rate", faults.GPU_ECC_CORRECTED),
        ("NVRM: Xid (PCI:0000:01:00 GPU-I:05): 94, pid=7194, Contained: CE User Channel (0x9). RST: No, D-RST: No",
         faults.GPU_ECC_CONTAINED),
        ("NVRM: Xid (PCI:0000:01:00): 95, pid=7, Uncontained: LTC TAG. RST: Yes", faults.GPU_ECC_ERROR),
        ("NVRM: Xid (PCI:0000:01:00): 140, ECC unrecovered", faults.GPU_ECC_ERROR),
        ("NVRM: Xid (PCI:0000:01:00): 171, DRAM", faults.GPU_ECC_ERROR),
        ("NVRM: Xid (PCI:0000:01:00): 154, GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)",
         faults.GPU_UNHEALTHY),
        ("NVRM: Xid (PCI:0000:01:00): 154, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)",
         None),
        ("Xid: 121 C2C", None),
        ("Xid: 999", faults.DRIVER_FAULT),
        # the worst counts
        ("Xid: 63 row\nXid: 48 DBE", faults.GPU_ECC_ERROR),
        ("Xid: 63 row\nXid: 119 GSP", faults.DRIVER_FAULT),
        ("Xid: 94 contained\nXid: 95 uncontained", faults.GPU_ECC_ERROR),
        ("Xid: 63 row\nXid: 94 contained\nXid: 45 removed", faults.GPU_ECC_CONTAINED),
    ],
)  # fmt: skip
def test_xid_messages_are_read_by_their_numbers(text: str, reason: str | None) -> None:
    found = texts.xid(text)
    assert (found.reason if found else None) == reason
    assert found is None or found.meaning.startswith("Xid ")


@pytest.mark.parametrize(
    ("number", "layer", "state", "do"),
    [
        (48, "L0", "fault", "reset the GPU"),
        (63, "L0", "note", "at the next maintenance"),
        (64, "L0", "fault", "reset the GPU"),
        (74, "L0.5", "fault", "NVLinks"),
        (79, "L0", "fault", "restart the machine"),
        (92, "L0", "note", "Watch the GPU"),
        (94, "L0", "fault", "the GPU may go on"),
        (95, "L0", "fault", "reset the GPU"),
        (119, "L1", "fault", "Restart the machine"),
        (31, "L3", "fault", "engine version"),
    ],
)
def test_an_xid_has_a_layer_and_a_next_step(number: int, layer: str, state: str, do: str) -> None:
    row = faults.advice(xids.XIDS[number].reason)
    assert (row.layer.value, row.state) == (layer, state)
    assert do in row.do


def test_what_is_only_worth_knowing_does_not_end_an_engine() -> None:
    assert texts.engine("NVRM: Xid (PCI:0000:3b:00): 63, row remapped") is None
    found = texts.engine("NVRM: Xid (PCI:0000:3b:00): 63, row remapped\ntorch.OutOfMemoryError: CUDA out of memory")
    assert found is not None
    assert found.reason == faults.OUT_OF_GPU_MEMORY
    found = texts.gpu("NVRM: Xid (PCI:0000:3b:00): 63, row remapped")
    assert found is not None
    assert found.explained == (
        "NVRM: Xid (PCI:0000:3b:00): 63, row remapped (Xid 63: a row of the GPU's memory was marked for remapping)"
    )


def test_metrics_and_texts_give_an_xid_the_same_reason() -> None:
    """One takes GPUs out of use, and both tell people why."""
    for number, reason in dcgm.NEEDS_RESET.items():
        assert xids.XIDS[number].reason == reason
        assert faults.advice(reason).state == "fault"
        assert reason in OF_GPUS
    mild = {faults.GPU_ECC_CONTAINED, faults.GPU_ECC_CORRECTED, faults.GPU_MEMORY_REPAIRED}
    assert not mild & OF_GPUS


def test_a_text_of_any_length_is_read_in_bounded_time() -> None:
    for text in ("x" * 1_000_000, "ibv_" * 250_000, "size mismatch for" * 60_000, "admission webhook " * 60_000):
        for read in (texts.engine, texts.gpu, texts.pull, texts.setup, texts.admission, texts.scheduler):
            found = read(text)
            assert found is None or len(found.quote) <= 300
