"""What a load's `spec` request becomes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from mstar.loader.config import read_config
from mstar.loader.errors import LoadError
from mstar.loader.manifest import head_fault
from mstar.loader.policy import SpecPolicy, check_built, decide
from tests.support.checkpoints import drop_tensor, edit_config, misshape_tensor, write_checkpoint

NO_HEAD = LoadError("unsupported", "there is no head", "spec.mtp")
BROKEN = LoadError("validation", "its head lacks fc.weight", "model")


@dataclass(frozen=True)
class Request:
    mtp: str = "auto"
    mtp_k: int = 3
    draft_head: str = "auto"
    ngram: str = "off"
    dflash: str = "off"
    dspark: str = "off"


def fault_of(path) -> LoadError:
    fault = head_fault(path, read_config(path))
    assert fault is not None
    return fault


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("mtp", ["on", "auto"])
@pytest.mark.parametrize("k", [1, 3, 8])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_with_a_head_a_load_drafts_on_one_rank_and_on_the_mesh_alike(tp, mtp, k, dtype):
    assert decide(Request(mtp=mtp, mtp_k=k), None, tp, dtype) == SpecPolicy(True, k, dtype, None)


@pytest.mark.parametrize("fault", [NO_HEAD, BROKEN])
def test_auto_serves_without_a_head_and_says_why(fault):
    assert decide(Request(), fault, 2, "bf16") == SpecPolicy(False, 0, None, fault.message)


@pytest.mark.parametrize("fault", [NO_HEAD, BROKEN])
@pytest.mark.parametrize("tp", [1, 2])
def test_on_refuses_what_auto_would_serve_without(fault, tp):
    with pytest.raises(LoadError) as caught:
        decide(Request(mtp="on"), fault, tp, "bf16")
    assert (caught.value.error_class, caught.value.field) == (fault.error_class, fault.field)
    assert fault.message in caught.value.message and "spec.mtp" in caught.value.message


@pytest.mark.parametrize("fault", [None, NO_HEAD, BROKEN])
def test_off_is_off_whatever_the_head(fault):
    policy = decide(Request(mtp="off"), fault, 1, "bf16")
    assert (policy.mtp, policy.k, policy.draft_head) == (False, 0, None)
    assert policy.reason == "switched off by spec.mtp"


@pytest.mark.parametrize("name", ["ngram", "dflash", "dspark", "draft_head"])
@pytest.mark.parametrize("fault", [None, NO_HEAD])
@pytest.mark.parametrize("tp", [1, 4])
@pytest.mark.parametrize("mtp", ["off", "auto", "on"])
def test_what_is_not_built_is_refused_by_name(name, fault, tp, mtp):
    request = replace(Request(mtp=mtp), **{name: "fp8" if name == "draft_head" else "on"})
    for refuse in (lambda: check_built(request), lambda: decide(request, fault, tp, "bf16")):
        with pytest.raises(LoadError) as caught:
            refuse()
        assert (caught.value.error_class, caught.value.field) == ("unsupported", f"spec.{name}")
        assert name.removesuffix("_head") in caught.value.message


def test_the_draft_head_is_of_the_loads_dtype_or_refused():
    assert decide(Request(draft_head="bf16"), None, 1, "bf16").draft_head == "bf16"
    with pytest.raises(LoadError) as caught:
        decide(Request(draft_head="bf16"), None, 1, "fp32")
    assert (caught.value.error_class, caught.value.field) == ("unsupported", "spec.draft_head")
    assert decide(Request(mtp="off", draft_head="bf16"), None, 1, "fp32").draft_head is None


# Which heads are served


@pytest.mark.parametrize("where", ["beside", "sidecar"])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("layers", [1, None])
def test_a_head_is_found_beside_the_trunk_and_in_a_sidecar(tmp_path, where, nested, layers):
    path = write_checkpoint(tmp_path, with_mtp=where, nested=nested, mtp_num_hidden_layers=layers)
    assert head_fault(path, read_config(path)) is None


def test_a_promise_of_the_config_is_no_head(tmp_path):
    fault = fault_of(write_checkpoint(tmp_path))  # its config says mtp_num_hidden_layers: 1
    assert (fault.error_class, fault.field) == ("unsupported", "spec.mtp")
    assert "no MTP head" in fault.message


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"mtp_num_hidden_layers": 2}, "mtp_num_hidden_layers is 2"),
        ({"mtp_num_hidden_layers": 0}, "mtp_num_hidden_layers is 0"),
        ({"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings is true"),
    ],
)
def test_a_head_of_another_kind_is_refused_by_name(tmp_path, fields, named):
    fault = fault_of(write_checkpoint(tmp_path, with_mtp="sidecar", **fields))
    assert (fault.error_class, fault.field) == ("unsupported", "spec.mtp")
    assert named in fault.message


def test_a_config_that_mistypes_its_head_is_refused_at_any_load(tmp_path):
    path = write_checkpoint(tmp_path)
    for field, value in (("mtp_num_hidden_layers", "1"), ("mtp_use_dedicated_embeddings", 1)):
        edit_config(path, **{field: value})
        with pytest.raises(LoadError) as caught:
            read_config(path)
        assert caught.value.field == field
        edit_config(path, **{field: ...})


def test_a_head_that_does_not_fit_is_a_fault_that_names_its_weights(tmp_path):
    path = write_checkpoint(tmp_path, with_mtp="beside")
    drop_tensor(path, "mtp.fc.weight")
    misshape_tensor(path, "mtp.layers.0.mlp.up_proj.weight")
    fault = fault_of(path)
    assert (fault.error_class, fault.field) == ("validation", "model")
    assert "missing: fc.weight" in fault.message and "layers.0.mlp.up_proj.weight (has [145" in fault.message
