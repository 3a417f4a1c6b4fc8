"""Made-up results with known numbers, for the tests that judge, print and draw."""

from __future__ import annotations

from holdfast.study import results
from holdfast.study.results import (
    BenchResult,
    ImportCost,
    Latency,
    Machine,
    Operation,
    Row,
    Sample,
    Spread,
    Temperature,
    summarise,
)

NBYTES = 1_000_000_000
MIB = 1 << 20

SAVE_SPEEDS = {
    results.RAW: 2.00,
    results.RAW_HUGE: 2.50,
    results.HOLDFAST: 1.92,
    results.RECYCLED: 1.97,
    results.FIO: 2.02,
    results.SAFETENSORS: 0.95,
    results.TORCH_NO_CRC: 1.00,
    results.TORCH: 0.62,
    results.DCP: 0.45,
    results.PICKLE: 0.97,
    results.SAVEZ: 0.55,
}
LOAD_SPEEDS = {
    results.RAW: 2.20,
    results.RAW_HUGE: 3.00,
    results.HOLDFAST: 2.05,
    results.RECYCLED: 2.06,
    results.FIO: 2.25,
    results.SAFETENSORS: 1.40,
    results.TORCH_NO_CRC: 1.05,
    results.TORCH: 1.04,
    results.DCP: 0.70,
    results.PICKLE: 1.15,
    results.SAVEZ: 0.80,
}
TITLES = {
    results.RAW: "raw device limit",
    results.RAW_HUGE: "raw, huge pages",
    results.HOLDFAST: "Holdfast",
    results.RECYCLED: "Holdfast, recycling",
    results.FIO: "fio (raw, again)",
    results.SAFETENSORS: "safetensors",
    results.TORCH_NO_CRC: "torch.save, no CRC",
    results.TORCH: "torch.save",
    results.DCP: "torch DCP",
    results.PICKLE: "pickle 5",
    results.SAVEZ: "np.savez",
}


def row(
    system: str,
    operation: Operation,
    gb_per_second: float,
    *,
    cpu_seconds_per_gb: float = 0.08,
    peak_mib: int = 40,
) -> Row:
    """A row whose median speed is the one given; its warm-up round is ten times slower and must not count."""
    samples = tuple(
        Sample(
            round=number,
            position=0,
            seconds=NBYTES / 1e9 / (gb_per_second * factor),
            cpu_seconds=cpu_seconds_per_gb * NBYTES / 1e9 * (10 if number == 0 else 1),
            peak_growth_nbytes=peak_mib * MIB if number == 0 else 0,
            temperature="cold" if operation == "load" else None,
        )
        for number, factor in enumerate((0.1, 0.95, 1.0, 1.04))
    )
    return Row(system, TITLES[system], operation, "measured", samples=samples)


def rows(**changed: Row) -> list[Row]:
    """All systems, both operations. A key such as ``save_torch`` replaces that row."""
    found = []
    for operation, speeds in (("save", SAVE_SPEEDS), ("load", LOAD_SPEEDS)):
        for system, speed in speeds.items():
            key = f"{operation}_{system.replace('-', '_')}"
            default = row(system, "save" if operation == "save" else "load", speed)
            found.append(changed.pop(key, default))
    assert not changed, f"no such row: {changed}"
    return found


def result(
    given: list[Row] | None = None,
    *,
    shape: str = "gpt2",
    temperature: Temperature = "cold",
    import_seconds: float = 0.03,
    heavy: tuple[str, ...] = (),
    latency_ratio: float = 1.2,
    load_before: float = 0.1,
) -> BenchResult:
    def exactly(value: float) -> Spread:
        return Spread(value, value * 0.9, value * 1.2)

    return BenchResult(
        created=1.75e9,
        directory="/data",
        shape=shape,
        state_nbytes=NBYTES,
        state_leaves=592,
        rounds=3,
        temperature=temperature,
        cache_method="drop_caches",
        machine=Machine("Linux", 8, load_before, "ext4", {"python": "3.12.0"}),
        rows=summarise(rows() if given is None else given, NBYTES),
        latency=Latency(
            65536,
            50,
            by_hand=exactly(0.001),
            save=exactly(0.001 * latency_ratio),
            checkpointer=exactly(0.001),
        ),
        import_cost=ImportCost(7, exactly(import_seconds), exactly(0.09), heavy),
        bars=(),
    )
