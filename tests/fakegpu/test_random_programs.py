"""Some of the programs drawn at random, others each day; `make test-gpu-programs` runs many."""

from __future__ import annotations

import datetime

import pytest
from random_programs import Program, judge

COUNT = 40


@pytest.mark.parametrize("of_today", range(COUNT))
def test_a_program_gives_what_the_cpu_does(driver, of_today):
    number = datetime.date.today().toordinal() * COUNT + of_today
    try:
        result = judge(number, driver)
    except AssertionError:
        print(f"program {number}: {Program.numbered(number)}")
        raise
    if result.startswith("not judged"):
        pytest.skip(result)
