"""The surface is that of tests/surface.json; keys of objects that take a run to see are checked where the run is."""

import json

import pytest

from tests.surface import FILE, OBJECTS, check, surface


@pytest.mark.parametrize("part", surface())
def test_the_surface_is_that_of_the_file(part):
    kept = json.loads(FILE.read_text(encoding="utf-8"))[part]
    if part == "JSON keys":
        kept = {name: keys for name, keys in kept.items() if name not in OBJECTS}
    check(kept, surface()[part])


def test_a_change_is_named_with_what_to_do():
    with pytest.raises(pytest.fail.Exception) as failed:
        check(
            {"a": "(x)", "b": "(y=1)", "c": None}, {"b": "(y=2)", "c": None, "d": "()"}
        )
    head, *lines = str(failed.value).splitlines()
    assert "python -m tests.surface --write" in head
    assert lines == ["a went", "d came", "b was '(y=1)', is '(y=2)'"]
