"""Every way to ask for the date or the time is put forward, and what does not ask stays as it is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ramet.checking import later

PROGRAM = """
import datetime, json, runpy, sys, time
before = time.time()
later = runpy.run_path(sys.argv[1])
later["put_forward"]()
now = datetime.datetime.now
moments = {
    "time": time.time(),
    "time_ns": time.time_ns() / 1e9,
    "localtime": time.mktime(time.localtime()),
    "gmtime": time.mktime(time.localtime(time.time())),
    "ctime": datetime.datetime.strptime(time.ctime(), "%a %b %d %H:%M:%S %Y").timestamp(),
    "strftime": datetime.datetime.strptime(time.strftime("%Y-%m-%d %H:%M:%S"), "%Y-%m-%d %H:%M:%S").timestamp(),
    "now": now().timestamp(),
    "now in a zone": now(datetime.UTC).timestamp(),
    "today": datetime.datetime.today().timestamp(),
    "utcnow": datetime.datetime.utcnow().replace(tzinfo=datetime.UTC).timestamp(),
}
day = (datetime.date.today() - datetime.date.fromtimestamp(before + later["SHIFT"].total_seconds())).days
fixed = datetime.datetime(2020, 1, 2, 3)
print(json.dumps({
    "shifts": {name: moment - before for name, moment in moments.items()},
    "day": day,
    "fixed": [repr(fixed), repr(datetime.date(2020, 1, 2)), time.strftime("%Y", time.gmtime(0)), time.ctime(0)[-4:]],
    "same": [isinstance(fixed, datetime.datetime), isinstance(now(), datetime.date), isinstance(1, datetime.date)],
}))
"""


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    words = [sys.executable, "-W", "ignore", "-c", PROGRAM, str(Path(later.__file__))]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_all_clocks_are_put_forward_by_as_much(found: dict[str, Any]) -> None:
    shift = later.SHIFT.total_seconds()
    assert len(found["shifts"]) == 10
    # An hour either way: half a year on, summer time may begin or end.
    assert [name for name, by in found["shifts"].items() if abs(by - shift) > 3700] == []
    assert found["day"] in (0, 1)


def test_moments_that_are_given_stay(found: dict[str, Any]) -> None:
    assert found["fixed"] == ["datetime.datetime(2020, 1, 2, 3, 0)", "datetime.date(2020, 1, 2)", "1970", "1970"]
    assert found["same"] == [True, True, False]
