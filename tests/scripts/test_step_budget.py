"""The budget of a decode step: floors from the shape, and traces made by hand whose times are known."""

import json
import math
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

import mstar.kernels
from mstar.arch.caches import cache_sizes
from mstar.loader.checkpoint import TORCH_DTYPES
from mstar.loader.config import FULL, parse_config
from mstar.loader.sharding import local_shape, weights_of
from mstar.scripts import step_budget
from mstar.scripts.make_checkpoint import make_config, write_virtual
from mstar.scripts.step_floor import StepShape, step_floor_s, step_ops, step_sequence
from mstar.scripts.step_trace import OTHER, TraceError, kernels_of, kind_of, median, step_times

CUBLAS = "nvjet_tst_64x8_64x16_2x1_v_bz_splitK_TNT"


def config_of(size, **fields):
    return parse_config(make_config(size, **fields), {}, {})


# Floors


@pytest.mark.parametrize("size", ["0.8B", "4B", "9B"])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_step_reads_every_projection_of_the_rank_once(size, tp):
    config = config_of(size)
    ops = step_ops(config, StepShape(1, 512, "bf16", tp=tp))
    read = sum(op.calls * op.weight_bytes for op in ops if op.kind == "linear")
    wanted = 0
    for weight in weights_of(config):
        matrix = len(weight.shape) == 2
        if matrix and (weight.name != "embed_tokens.weight" or config.tie_word_embeddings):
            wanted += 2 * math.prod(local_shape(weight, config, 0, tp))
        elif "layernorm" in weight.name or weight.name == "norm.weight":
            wanted += 4 * weight.shape[0]
    assert read == wanted


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("tp", [1, 2])
def test_a_step_reads_the_kv_of_every_sequence_and_its_states_twice(dtype, tp):
    config = config_of("27B")
    shape = StepShape(3, 1000, dtype, tp=tp)
    each = cache_sizes(config, tp, TORCH_DTYPES[dtype], 1)  # blocks of one token
    ops = {op.name: op for op in step_ops(config, shape)}
    attention, written = ops["attention"], ops["qkv_norm_rope_cache"]
    assert attention.calls * attention.kv_bytes == 3 * 1000 * each.block_bytes
    assert written.calls * written.kv_bytes == 3 * each.block_bytes
    states = 48 * (48 // tp) * 128 * 128 * 4
    windows = each.slot_bytes - states  # the conv's last three inputs of every layer; a fourth is written
    assert ops["gdn"].calls * ops["gdn"].state_bytes == 3 * (2 * states + windows + windows // 3)


def test_floors_are_those_of_the_design():
    # milliseconds that the weights take alone at 4.2 TB/s
    for size, wanted in {"0.8B": 0.36, "2B": 0.90, "4B": 2.0, "9B": 3.8, "27B": 12.2}.items():
        ops = step_ops(config_of(size), StepShape(1, 1, "bf16"))
        weights = sum(op.calls * op.weight_bytes for op in ops)
        assert weights / 4.2e9 == pytest.approx(wanted, rel=0.02)
    config = config_of("0.8B")
    ops = step_ops(config, StepShape(1, 512, "bf16"))
    moved, launches = (
        sum(op.calls * getattr(op, what) for op in ops) for what in ("floor_bytes", "launches")
    )
    assert launches == 18 * 5 + 6 * 7 + 5
    assert step_floor_s(config, StepShape(1, 512, "bf16")) == pytest.approx(
        moved / 4.2e12 + launches * 0.8e-6
    )
    assert step_floor_s(config, StepShape(16, 512, "bf16")) > step_floor_s(config, StepShape(4, 512, "bf16"))


def test_a_mesh_meets_after_each_row_parallel_product():
    config = config_of("0.8B")
    one, two = (step_sequence(config, StepShape(1, 512, "bf16", tp=tp)) for tp in (1, 2))
    assert sum(op.kind == "collective" for op in two) == 2 * 24 + 1
    assert [op.name for op in two if op.kind != "collective"] == [op.name for op in one]


# Traces


def test_every_kernel_that_is_launched_has_a_kind():
    folder = Path(mstar.kernels.__file__).parent
    launched = {
        name
        for file in folder.glob("*/gpu/*.py")
        for name in re.findall(r"^ +(?:launched = )?(\w+)\[(?:grid|\()", file.read_text(), re.MULTILINE)
    }
    assert {"_begin_step", "_gdn_decode", "_attend_decode"} <= launched
    assert [name for name in sorted(launched) if kind_of(name) is None] == []


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("_fma", "linear"),
        ("_dot", "linear"),
        ("_mma", "linear"),
        ("_stream", "linear"),
        (CUBLAS, "linear"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float>(…)", "after"),
        ("void gemv2T_kernel_val<int, int, __nv_bfloat16>(…)", "linear"),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(…)", "collective"),
        ("void at::native::vectorized_elementwise_kernel<4>(…)", None),
        ("Memcpy DtoH (Device -> Pinned)", None),
    ],
)
def test_kinds_of_kernels(name, kind):
    assert kind_of(name) == kind


class Hand:
    """Writes kernels one after the other, `lead` microseconds before the one before each has ended."""

    def __init__(self, lead=0.0):
        self.events = []
        self.now = 1000.0
        self.lead = lead

    def run(self, *names, us=2.0, cat="kernel"):
        for name in names:
            begun = self.now - self.lead
            self.now += us
            event = {"ph": "X", "cat": cat, "name": name, "ts": begun, "dur": self.now - begun}
            self.events.append(event)

    def wait(self, us):
        self.now += us

    def step(self, config, cublas=False):
        """A step as the kernels run it: linears of one launch, or as cuBLAS has them."""
        plain = [CUBLAS] if cublas else ["_fma"]
        normed = ["_rms_norm_rows", *plain] if cublas else plain
        gated = [*normed, "_silu_gated"] if cublas else plain
        added = [*plain, "_add_parts"] if cublas else plain
        self.run("_begin_step")
        for kind in config.layer_types:
            mixer = ["_qkv_norm_rope_cache", "_attend_decode", "_reduce_segments"]
            self.run(*normed)
            self.run(*(mixer if kind == FULL else ["_gdn_decode"]), us=5.0)
            self.run(*added, *gated, *added)
        self.run("_rms_norm_rows", *plain)
        self.run("_partial_draws", "_finish_step")


@pytest.fixture
def config():
    return config_of("0.8B", scale=8, layers=4)


def read(hand, config):
    return step_times(kernels_of(hand.events), step_sequence(config, StepShape(1, 512, "bf16")))


@pytest.mark.parametrize("lead", [0.0, 1.5])
@pytest.mark.parametrize("cublas", [False, True])
def test_operations_get_their_kernels_by_place(config, lead, cublas):
    hand = Hand(lead)
    for _ in range(3):
        hand.step(config, cublas)
        hand.wait(10 + lead)
        hand.run("Memcpy DtoH (Device -> Pinned)", cat="gpu_memcpy")
    times = read(hand, config)
    assert times.missed == set() and OTHER not in times.ops
    kernels = {name: median(op.kernels) for name, op in times.ops.items()}
    each = 2 if cublas else 1  # kernels of a linear with norm or residual
    assert kernels == {
        "embedding": 1,
        "gdn in_proj": 3 * each,
        "gdn": 3,
        "gdn out_proj": 3 * each,
        "attention in_proj": each,
        "qkv_norm_rope_cache": 1,
        "attention": 2,
        "attention out_proj": each,
        "gate_up": 4 * (3 if cublas else 1),
        "down": 4 * each,
        "final norm, lm_head": 2,
        "draw": 1,
        "finish": 1,
    }
    micro = {name: 1e6 * median(op.seconds) for name, op in times.ops.items()}
    assert micro["gdn"] == pytest.approx(15) and micro["attention"] == pytest.approx(10)
    assert micro["gate_up"] == pytest.approx(2 * kernels["gate_up"])
    assert times.kernels == [sum(kernels.values())] * 3
    # what ran before its predecessor's end is counted once: the parts are the whole, whatever the overlap
    assert sum(micro.values()) == pytest.approx(1e6 * median(times.steps))
    assert [1e6 * gap for gap in times.gaps] == pytest.approx([12.0, 12.0])


def test_gaps_are_between_neighbouring_steps_alone(config):
    hand = Hand()
    hand.step(config)
    hand.wait(20)
    hand.step(config)
    hand.wait(5)
    hand.run("_attend_prefill", us=500)
    hand.step(config)
    hand.wait(30)
    hand.step(config)
    times = read(hand, config)
    assert len(times.steps) == 4
    assert [1e6 * gap for gap in times.gaps] == pytest.approx([20, 30])


def test_kernels_of_no_operation_are_listed_apart(config):
    hand = Hand()
    hand.run("_begin_step", us=1.0)
    hand.run("void at::native::index_select", us=7.0)
    begun = len(hand.events)
    hand.step(config)
    del hand.events[begun]  # its own _begin_step
    times = read(hand, config)
    assert 1e6 * median(times.ops[OTHER].seconds) == pytest.approx(7)
    assert times.ops[OTHER].names == {"void at::native::index_select"} and times.missed == set()


def test_a_trace_of_another_model_says_so(config):
    hand = Hand()
    hand.step(config_of("0.8B", scale=8, layers=8))
    assert OTHER in read(hand, config).ops
    hand = Hand()
    hand.step(config)
    assert "finish" in read(hand, config_of("0.8B", scale=8, layers=8)).missed


def test_a_trace_without_steps_is_an_error(config):
    hand = Hand()
    hand.run("_fma", "_begin_step", "_fma")
    with pytest.raises(TraceError, match="no decode step"):
        read(hand, config)


# The command


@pytest.fixture
def model(tmp_path):
    write_virtual(tmp_path / "m", make_config("0.8B", 8, acceptance=0.7, layers=4), 0)
    return tmp_path / "m"


def test_the_command_reads_a_trace(model, tmp_path):
    hand = Hand()
    for _ in range(5):
        hand.step(config_of("0.8B", scale=8, layers=4, acceptance=0.7))
        hand.wait(40)
    host = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 9}
    (tmp_path / "t.json").write_text(json.dumps({"traceEvents": [host, {"ph": "M"}, *hand.events]}))
    arguments = [
        str(model),
        "--batch",
        "4",
        "--trace",
        str(tmp_path / "t.json"),
        "--json",
        str(tmp_path / "r.json"),
    ]
    ran = CliRunner().invoke(step_budget.main, arguments)
    assert ran.exit_code == 0, ran.output
    said = " ".join(ran.output.split())  # a long path wraps lines
    assert "PLANTED acceptance 0.7" in said and "NOT under 30" in said
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["measured"]["gap_p50_us"] == pytest.approx(40)
    rows = {row["op"]: row for row in report["ops"]}
    assert rows["gdn"]["us"] == pytest.approx(15)
    assert rows["gdn"]["ratio"] == pytest.approx(15 / rows["gdn"]["floor_us"])
    assert sum(row["floor_us"] for row in report["ops"]) == pytest.approx(report["floor_us"])
    assert report["measured"]["missed"] == [] and report["measured"]["kernels"] == 3 * 5 + 7 + 5


def test_without_a_gpu_the_command_prints_floors_and_says_so(model, monkeypatch):
    monkeypatch.setattr(step_budget, "has_gpu", lambda: False)
    ran = CliRunner().invoke(step_budget.main, [str(model)])
    assert ran.exit_code == 0 and "No GPU here" in ran.output and "lm_head" in ran.output


@pytest.mark.parametrize("content", [None, "{", '{"traceEvents": []}'])
def test_a_trace_that_is_none_is_named(model, tmp_path, content):
    path = tmp_path / "t.json"
    if content is not None:
        path.write_text(content)
    ran = CliRunner().invoke(step_budget.main, [str(model), "--trace", str(path)])
    assert ran.exit_code == 1 and ("t.json" in ran.output or "no decode step" in ran.output)
