import tomllib

from hypothesis import given
from hypothesis import strategies as st

from agentjet.config.line import key_lines, leaves, nearest_line

NAME = st.text("abcxyz", min_size=1, max_size=4)
VALUE = st.sampled_from(["1", '"x = 1"', "[\n 1,\n 2,\n]", '"""\n[no.table]\na = 1\n"""', "{ k = 1 }", "'#'"])


@given(st.dictionaries(NAME, st.dictionaries(NAME, VALUE, min_size=1), min_size=1))
def test_each_key_stands_on_the_line_it_is_given(tables):
    lines, expected = [], {}
    for table, keys in tables.items():
        lines.append(f"[{table}] # comment")
        for key, value in keys.items():
            lines.append("")
            expected[(table, key)] = len(lines) + 1
            lines += f"{key} = {value}".split("\n")
    text = "\n".join(lines)
    tomllib.loads(text)
    found = key_lines(text)
    assert {key: found[key] for key in expected} == expected


def test_nearest_line_is_that_of_the_innermost_table():
    lines = key_lines("[a]\n[a.b]\nc = 1\n")
    assert nearest_line(lines, ("a", "b", "c")) == 3
    assert nearest_line(lines, ("a", "b", "x", "y")) == 2
    assert nearest_line(lines, ("z",)) is None


def test_arrays_of_tables_are_read():
    assert key_lines("[[a]]\nb = 1\n")[("a",)] == 1


def test_leaves_hold_empty_tables():
    assert list(leaves({"a": {"b": 1, "c": {}}})) == [(("a", "b"), 1), (("a", "c"), {})]
