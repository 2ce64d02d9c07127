"""Choices of kernels: what a table is held to, what the bench keeps, and what promoting makes of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from mstar.kernels import promote
from mstar.kernels.bench import __main__ as bench
from mstar.kernels.bench.store import Measured, Store, StoreError
from mstar.kernels.bench.tune import KEPT, DeviceLost, Job, measure_size, table_of, tune
from mstar.kernels.registry import GemmKey, KernelChoice, device_slug, read_table, row_bucket, table_path

STACK = {"torch": "2.11", "triton": "3.6"}
UNDER = Measured("sm_90", "h200", STACK)
KEY = GemmKey("norm", 4, 8224, 1024, "bf16")
GATED = GemmKey("gated", 1, 3584, 1024, "bf16")
CUBLAS = KernelChoice("cublas")
FMA = KernelChoice("fma", (("BLOCK_K", 256), ("BLOCK_N", 16)))
DOT = KernelChoice("dot", (("BLOCK_N", 32), ("SPLIT_K", 1)))
MANY = [KernelChoice("fma", (("BLOCK_N", 1 << i),)) for i in range(8)]


class FakeLinears:
    """cuBLAS by default, in as many launches as the kind needs; others in one, or two where K is split."""

    def __init__(self, offered: list[KernelChoice] | None = None):
        self.offered = [CUBLAS, FMA, DOT] if offered is None else offered

    def default(self, key: GemmKey) -> KernelChoice:
        return CUBLAS

    def candidates(self, key: GemmKey) -> list[KernelChoice]:
        return self.offered

    def launches(self, choice: KernelChoice, key: GemmKey) -> int:
        if choice == CUBLAS:
            return {"norm": 2, "gated": 3, "residual": 2}.get(key.kind, 1)
        return 2 if ("SPLIT_K", 1) in choice.params else 1


class FakeRig:
    """Times by candidate and pass; a text in place of times is how that candidate fails."""

    def __init__(self, times: dict[str, list[float] | str]):
        self.times = times
        self.ran: list[str] = []
        self.compiled: list[tuple[GemmKey, KernelChoice]] = []
        self.released = 0

    def compile(self, jobs, seconds):
        self.compiled += jobs

    def prepare(self, key, choice):
        times = self.times[choice.name]
        if isinstance(times, str):
            raise DeviceLost(times) if times == "lost" else RuntimeError(f"{times}\nand more")
        left = iter(times)

        def one_pass() -> float:
            self.ran.append(choice.name)
            return next(left)

        return one_pass

    def release(self):
        self.released += 1


def size_of(key: GemmKey = KEY, **times: list[float] | str):
    """An entry of the store; fma, dot, cublas: times of FMA, DOT and the default."""
    names = {"fma": FMA.name, "dot": DOT.name, "cublas": CUBLAS.name}
    offered = [choice for choice in (CUBLAS, FMA, DOT) if choice.kernel in times]
    rig = FakeRig({names[kernel]: value for kernel, value in times.items()})
    return measure_size(key, FakeLinears(offered), rig, 3)


def choice_of(key: GemmKey = KEY, **times: list[float] | str) -> str:
    return promote.decide(key, size_of(key, **times)).choice


def promoted(tmp_path: Path, sizes: dict[GemmKey, dict], under: Measured = UNDER) -> Path:
    """The path of a table of these sizes, made by the command."""
    for key, size in sizes.items():
        Store(tmp_path / "store").add("0.8B-tp1", under, key.name, size)
    ran = CliRunner().invoke(
        promote.main,
        ["decode_gemm", "--store", str(tmp_path / "store"), "--tables", str(tmp_path / "tables")],
    )
    assert ran.exit_code == 0, ran.output
    return table_path(under.arch, under.device, tmp_path / "tables")


def edited(path: Path, change) -> Path:
    content = json.loads(path.read_text())
    change(content["entries"])
    path.write_text(json.dumps(content))
    return path


# names and buckets


@pytest.mark.parametrize("kind, start", [("plain", "plain-"), ("f32", "f32-"), ("gated", "gated1-")])
def test_a_key_is_its_name_and_back(kind, start):
    key = GemmKey(kind, 16, 248320, 1024, "fp16")
    assert key.name == f"{start}r16-n248320-k1024-fp16"
    assert GemmKey.parse(key.name) == key


@pytest.mark.parametrize("name", ["", "norm-r4-n8-k8-int8", "other-r4-n8-k8-bf16", "norm-r4-n8-k8-bf16-x"])
def test_what_names_no_size_is_refused(name):
    with pytest.raises(ValueError, match="names no size"):
        GemmKey.parse(name)


def test_rows_go_up_to_the_next_bucket():
    assert [row_bucket(rows) for rows in (1, 3, 4, 65, 256, 257)] == [1, 4, 4, 128, 256, None]


def test_a_choices_name_is_one_word():
    assert FMA.name == "fma-BLOCK_K256-BLOCK_N16"
    assert CUBLAS.name == "cublas"


@pytest.mark.parametrize(
    "marketing, slug",
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100-80gb-hbm3"),
        ("AMD Instinct MI325X", "mi325x"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
    ],
)
def test_devices_are_called_by_their_model(marketing, slug):
    assert device_slug(marketing) == slug


# tables


def test_a_table_chooses_and_leaves_other_sizes_to_the_default(tmp_path):
    path = promoted(tmp_path, {KEY: size_of(cublas=[9, 9, 9], fma=[5, 5, 5])})
    table = read_table(path, STACK, FakeLinears())
    assert table.notes == ()
    assert table.choose(KEY) == FMA
    assert table.choose(GemmKey("norm", 8, KEY.n, KEY.k, "bf16")) == CUBLAS


def test_an_edit_of_one_word_moves_a_size(tmp_path):
    path = promoted(tmp_path, {KEY: size_of(cublas=[9, 9, 9], fma=[5, 5, 5], dot=[6, 6, 6])})
    text = path.read_text()
    assert text.count(f'"choice": "{FMA.name}"') == 1
    path.write_text(text.replace(f'"choice": "{FMA.name}"', f'"choice": "{DOT.name}"'))
    assert read_table(path, STACK, FakeLinears()).choose(KEY) == DOT


def test_a_device_without_a_table_takes_defaults_and_says_so(tmp_path):
    table = read_table(table_path("gfx942", "mi325x", tmp_path), STACK, FakeLinears())
    assert table.choose(KEY) == CUBLAS
    assert table.notes == ("decode_gemm table gfx942/mi325x: there is none, so defaults run",)


def test_a_table_of_another_stack_is_refused_with_both_named(tmp_path):
    path = promoted(tmp_path, {KEY: size_of(cublas=[9, 9, 9], fma=[5, 5, 5])})
    table = read_table(path, {**STACK, "triton": "3.7"}, FakeLinears())
    assert table.choose(KEY) == CUBLAS
    assert "tuned on torch 2.11, triton 3.6, and this is torch 2.11, triton 3.7" in table.notes[0]


def test_an_unknown_kernel_is_refused_and_the_other_entries_stand(tmp_path):
    sizes = {key: size_of(key, cublas=[9, 9, 9], fma=[5, 5, 5]) for key in (KEY, GATED)}
    path = promoted(tmp_path, sizes)

    def rename(entries):
        entries[KEY.name]["candidates"][FMA.name]["kernel"] = "wgmma"

    table = read_table(edited(path, rename), STACK, FakeLinears())
    assert table.choose(KEY) == CUBLAS
    assert table.choose(GATED) == FMA
    assert len(table.notes) == 1
    assert KEY.name in table.notes[0] and "'wgmma'" in table.notes[0]


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda entry: entry.update(choice="mistyped"), "'mistyped' is not among the candidates"),
        (lambda entry: entry.update(choice=DOT.name), "failed when it was measured"),
        (lambda entry: entry.pop("choice"), "not an entry"),
        (
            lambda entry: entry["candidates"][FMA.name].update(params={"BLOCK_K": 256, "BLOCK_N": 3}),
            "not powers of two",
        ),
        (
            lambda entry: entry["candidates"][FMA.name].update(params={"BLOCK_N": 8, "K": 16}),
            "not the parameters",
        ),
        (
            lambda entry: entry["candidates"][FMA.name].update(params={"BLOCK_N": float("inf")}),
            "not the parameters",
        ),
        (lambda entry: entry.update(candidates=[FMA.name]), "not an entry"),
        (lambda entry: entry["candidates"][FMA.name].update(params={"BLOCK_N": "x"}), "not the parameters"),
    ],
)
def test_a_broken_entry_is_refused_by_name(tmp_path, change, said):
    path = promoted(tmp_path, {KEY: size_of(cublas=[9, 9, 9], fma=[5, 5, 5], dot="wrong bytes")})
    table = read_table(edited(path, lambda entries: change(entries[KEY.name])), STACK, FakeLinears())
    assert table.choose(KEY) == CUBLAS
    assert said in table.notes[0] and KEY.name in table.notes[0]


@pytest.mark.parametrize("text", ["", "[]", '{"stack": 1, "entries": {}}', "\u00ff"])
def test_what_is_no_table_is_refused(tmp_path, text):
    path = table_path("sm_90", "h200", tmp_path)
    path.parent.mkdir(parents=True)
    path.write_bytes(text.encode("latin-1"))
    table = read_table(path, STACK, FakeLinears())
    assert table.choose(KEY) == CUBLAS
    assert "not a table" in table.notes[0]


# promotion


@pytest.mark.parametrize(
    "cublas, fma, moves",
    [
        ([10.0] * 3, [9.0] * 3, True),
        ([10.0] * 3, [9.3] * 3, False),  # 7 %, 0.7 us
        ([100.0] * 3, [98.5] * 3, False),  # 1.5 us, 1.5 %
        ([100.0] * 3, [97.9] * 3, True),
        ([9.0] * 3, [10.0] * 3, False),
        ([10.0, 10.0, 8.0], [9.0, 9.0, 9.0], False),  # another winner in one pass
        ([10.0] * 3, "it failed", False),
        ("it failed", [5.0] * 3, False),
    ],
)
def test_a_size_leaves_the_default_for_2_percent_and_a_node(cublas, fma, moves):
    assert choice_of(cublas=cublas, fma=fma) == (FMA.name if moves else CUBLAS.name)


def test_passes_that_differ_by_more_than_the_gain_keep_the_default():
    assert choice_of(cublas=[12.0, 10.0, 12.0], fma=[9.0, 9.0, 9.0]) == FMA.name  # 2 of 3 us
    assert choice_of(cublas=[12.0, 10.0, 11.0], fma=[9.4, 9.8, 9.9]) == CUBLAS.name  # 2 of 1.2 us


def test_winners_that_tie_in_every_pass_do_not_disagree():
    times = {"cublas": [10.0] * 3, "fma": [5.0, 5.05, 5.0], "dot": [5.02, 5.0, 5.04]}
    assert choice_of(**times) == FMA.name


def test_a_kernel_more_keeps_the_default():
    plain = GemmKey("plain", 1, 1024, 2048, "bf16")
    assert choice_of(plain, cublas=[10.0] * 3, dot=[5.0] * 3) == CUBLAS.name  # two launches for one
    assert choice_of(KEY, cublas=[10.0] * 3, dot=[5.0] * 3) == DOT.name  # two for two


def test_a_fused_gate_and_up_needs_the_2_percent_alone():
    assert choice_of(GATED, cublas=[10.0] * 3, fma=[9.7] * 3) == FMA.name
    assert choice_of(GATED, cublas=[10.0] * 3, fma=[9.9] * 3) == CUBLAS.name
    assert choice_of(GATED, cublas=[10.0] * 3, dot=[9.7] * 3) == CUBLAS.name  # not in one launch


def test_one_pass_is_not_enough():
    size = measure_size(KEY, FakeLinears([FMA]), FakeRig({CUBLAS.name: [10.0], FMA.name: [5.0]}), 1)
    assert promote.decide(KEY, size).choice == CUBLAS.name


def test_promoting_again_gives_the_same_bytes_and_undoes_edits(tmp_path):
    sizes = {key: size_of(key, cublas=[9, 9.1, 9], fma=[5, 5, 5.2]) for key in (GATED, KEY)}
    path = promoted(tmp_path, sizes)
    first = path.read_bytes()
    edited(path, lambda entries: entries[KEY.name].update(choice=CUBLAS.name))
    assert path.read_bytes() != first
    assert promoted(tmp_path, {}).read_bytes() == first


def test_the_order_of_measuring_does_not_show_in_the_table(tmp_path):
    sizes = {key: size_of(key, cublas=[9, 9, 9], fma=[5, 5, 5]) for key in (KEY, GATED)}
    one = promoted(tmp_path / "one", sizes).read_bytes()
    other = promoted(tmp_path / "other", dict(reversed(sizes.items()))).read_bytes()
    assert one == other


def test_an_entry_keeps_every_candidate_with_its_times_and_parameters(tmp_path):
    path = promoted(tmp_path, {KEY: size_of(cublas=[9, 9, 9], fma=[5, 5, 5], dot="no such shape")})
    entry = json.loads(path.read_text())["entries"][KEY.name]
    fma = entry["candidates"][FMA.name]
    assert fma == {"kernel": "fma", "params": {"BLOCK_K": 256, "BLOCK_N": 16}, "launches": 1, "us": [5, 5, 5]}
    assert entry["candidates"][DOT.name]["error"] == "RuntimeError: no such shape"
    assert entry["default"] == CUBLAS.name


def test_nothing_is_promoted_from_stores_that_do_not_fit(tmp_path):
    def run(store: Path) -> str:
        store.mkdir(exist_ok=True)
        ran = CliRunner().invoke(
            promote.main, ["decode_gemm", "--store", str(store), "--tables", str(tmp_path / "tables")]
        )
        assert ran.exit_code == 1
        return ran.output

    assert "no measured sizes" in run(tmp_path / "empty")
    mixed = Store(tmp_path / "mixed")
    mixed.add("a", UNDER, KEY.name, size_of(cublas=[9, 9, 9]))
    mixed.add("b", Measured("sm_90", "h200", {"torch": "2.12", "triton": "3.6"}), KEY.name, {})
    assert "another stack" in run(tmp_path / "mixed")
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "x.json").write_text("{}")
    assert "not what the bench writes" in run(tmp_path / "odd")
    assert not (tmp_path / "tables").exists()


# the bench


def test_the_fastest_of_the_first_pass_and_the_default_go_on_in_turn():
    times = {choice.name: [1.0 + i] * 3 for i, choice in enumerate(MANY)}
    rig = FakeRig({**times, CUBLAS.name: [99.0] * 3})
    size = measure_size(KEY, FakeLinears(MANY), rig, 3)
    lengths = {name: len(entry["us"]) for name, entry in size["candidates"].items()}
    kept = [choice.name for choice in MANY[:KEPT]]
    assert {name for name, length in lengths.items() if length == 3} == {CUBLAS.name, *kept}
    assert set(lengths.values()) == {1, 3}
    passes = rig.ran[-2 * (KEPT + 1) :]
    assert passes == [*reversed([CUBLAS.name, *kept]), CUBLAS.name, *kept]
    assert rig.released == 1
    assert promote.decide(KEY, size).choice == MANY[0].name


def jobs(rows=(1, 2, 4, 64)) -> list[Job]:
    return [Job("0.8B-tp1", GemmKey("norm", row, 64, 64, "bf16"), "gdn in_proj") for row in rows]


def tuned(store: Store, rig: FakeRig, budget_s: float = 100.0, jobs_of=None, clock=lambda: 0.0):
    return tune(
        jobs() if jobs_of is None else jobs_of,
        linears=FakeLinears([FMA]),
        rig=rig,
        store=store,
        under=UNDER,
        passes=3,
        budget_s=budget_s,
        say=lambda line: None,
        clock=clock,
    )


def steady() -> FakeRig:
    return FakeRig({CUBLAS.name: [9.0] * 3, FMA.name: [5.0] * 3})


def test_a_bench_out_of_time_goes_on_where_it_ended(tmp_path):
    store, ticks = Store(tmp_path), iter(range(1000))
    done, left = tuned(store, steady(), budget_s=12, clock=lambda: float(next(ticks)))
    assert 0 < len(done) < 4 and len(done) + len(left) == 4
    assert [GemmKey.parse(name).rows for name in done] == [1, 4, 64, 2][: len(done)]
    rig = steady()
    again, left = tuned(store, rig)
    assert left == [] and set(again).isdisjoint(done) and len(store.sizes()) == 4
    assert {key.name for key, _ in rig.compiled} == set(again)
    assert tuned(store, steady())[0] == {}


def test_no_time_measures_nothing(tmp_path):
    done, left = tuned(Store(tmp_path), steady(), budget_s=0)
    assert done == {} and len(left) == 4


def test_a_size_of_two_models_is_measured_once(tmp_path):
    rig = steady()
    twice = [*jobs((4,)), Job("9B-tp1", jobs((4,))[0].key, "down")]
    done, left = tuned(Store(tmp_path), rig, jobs_of=twice)
    assert len(done) == 1 and left == [] and len(rig.ran) == 6


def test_a_lost_device_ends_the_bench_and_keeps_what_was_measured(tmp_path):
    store = Store(tmp_path)
    tuned(store, steady(), jobs_of=jobs((1,)))
    with pytest.raises(DeviceLost):
        tuned(store, FakeRig({CUBLAS.name: [9.0] * 3, FMA.name: "lost"}))
    assert store.sizes() == {jobs((1,))[0].key.name}


def test_figures_of_another_stack_do_not_meet_in_one_store(tmp_path):
    store = Store(tmp_path)
    tuned(store, steady(), jobs_of=jobs((1,)))
    store.check(UNDER)
    with pytest.raises(StoreError, match="another device or stack"):
        store.check(Measured("sm_90", "h200", {**STACK, "torch": "2.12"}))


def test_from_bench_to_choice(tmp_path):
    store = Store(tmp_path / "store")
    done, _ = tuned(store, steady())
    table = read_table(promoted(tmp_path, {}), STACK, FakeLinears())
    assert [table.choose(job.key) for job in jobs()] == [FMA] * 4
    lines = table_of(done)
    assert len(lines) == 5 and "9.00" in lines[1] and "5.00" in lines[1] and FMA.name in lines[1]


def test_the_command_refuses_what_it_cannot_time(tmp_path):
    def run(*options: str) -> str:
        ran = CliRunner().invoke(bench.main, ["decode_gemm", "--store", str(tmp_path), *options])
        assert ran.exit_code != 0
        return ran.output

    assert "numbers with commas" in run("--model", "0.8B", "--rows", "1,x")
    assert "not 3" in run("--model", "0.8B", "--rows", "1,3")
    assert "tp 3 does not divide" in run("--model", "0.8B", "--tp", "3")
    assert "there is no directory" in run("--model", "0.9B-no-such")


RESIDUAL_NAME = "residual-r8-n1024-k2048-bf16"
MMA_PARAMS = {"BLOCK_K": 512, "BLOCK_N": 16, "SPLIT_K": 1, "num_warps": 4}


@pytest.mark.parametrize(
    "name, kernel, changed, taken",
    [
        (RESIDUAL_NAME, "mma", {"AHEAD": 4, "SOON": 1, "TOUCH": 1}, True),
        (RESIDUAL_NAME, "mma", {"PRELOAD": 1}, False),  # fma's
        (RESIDUAL_NAME, "mma", {"NORM_FIRST": 1}, False),  # there is no norm
        (RESIDUAL_NAME, "mma", {"BLOCK_K": 64}, False),
        (RESIDUAL_NAME, "mma", {"BLOCK_N": 8}, False),
        ("norm-r8-n1024-k2048-bf16", "mma", {"NORM_FIRST": 1}, True),
        (RESIDUAL_NAME, "cublas", {"AHEAD": 4}, False),
    ],
)
def test_what_a_kernel_does_not_take_is_refused(tmp_path, name, kernel, changed, taken):
    candidates = pytest.importorskip("mstar.kernels.linear.gpu.candidates")
    params = (MMA_PARAMS if kernel == "mma" else {}) | changed
    entry = {"choice": "it", "candidates": {"it": {"kernel": kernel, "params": params}}}
    path = tmp_path / "decode_gemm.json"
    path.write_text(json.dumps({"stack": STACK, "entries": {name: entry}}))
    table = read_table(path, STACK, candidates)
    assert (table.notes == ()) == taken
    assert table.choose(GemmKey.parse(name)) == (
        KernelChoice(kernel, tuple(sorted(params.items())))
        if taken
        else candidates.default(GemmKey.parse(name))
    )
